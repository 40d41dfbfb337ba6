"""The controller's HTTP: a page for people, ``/status`` for tools, ``/metrics`` for Prometheus.

``everstep plan`` requests ``/losses``. Only ``/actions`` change anything, and they need the run's
token. Beyond loopback, reading needs it, too, except that a Prometheus on this machine scrapes
``/metrics`` without it. On loopback the host name in the request must be one of this machine's:
otherwise a page of another site could map its own name to this address and read the answers (DNS
rebinding).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.errors import OrchestratorError, TokenError
from orchestrator.report import live_page
from orchestrator.shell.serve.live import Live
from orchestrator.shell.serve.metrics import RunCollector
from ucp_core.errors import StorageError

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

#: The page loads nothing from other places, and no other page may show it in a frame.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
_SCHEME = "Bearer "
_LOCAL_NAMES = frozenset(("127.0.0.1", "::1", "localhost"))

#: Performs an action, given its name, the token and its arguments; returns a line for people.
Act = Callable[[str, str, Mapping[str, Any]], Awaitable[str]]


class StatusPage:
    """Serves documents about the run, and the page that shows them.

    Args:
        port: Port to listen on; a free one is used if it is 0 or taken.
        status: Returns the JSON document of ``/status``.
        losses: Returns the document of ``/losses``; may wait for answers of keepers.
        live: The data of the page.
        act: Performs an action that a person requests there.
        require: Raises ``TokenError`` unless it is called with the run's token.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        status: Callable[[], dict[str, Any]],
        losses: Callable[[], Awaitable[dict[str, Any]]],
        metrics: RunCollector,
        live: Live,
        act: Act,
        require: Callable[[str], None],
    ) -> None:
        self._host = host
        self._port = port
        self._status = status
        self._losses = losses
        self._live = live
        self._act = act
        self._require = require
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, last_port: int = 0) -> str:
        """Start to serve; return the page's URL.

        Without a configured port it uses ``last_port``, where an open tab expects the page.
        """
        # In a thread: the import takes 0.1 s or more, and the run's loop must not wait.
        await asyncio.to_thread(importlib.import_module, "aiohttp.web")
        from aiohttp import web

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self._refusal(request)
            return await handler(request) if refusal is None else refusal

        app = web.Application(middlewares=[guarded])
        app.router.add_get("/", self._get_page)
        app.router.add_get("/page.json", self._get_document)
        app.router.add_get("/report", self._get_report)
        app.router.add_get("/log", self._get_log)
        app.router.add_post("/actions/{name}", self._post_action)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/losses", self._get_losses)
        app.router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        wanted = self._port or last_port
        try:
            await web.TCPSite(self._runner, self._host, wanted).start()
        except OSError as error:
            # Two runs may share a machine, and a port that is taken must not end a run.
            log.warning("port %s cannot be used, so another one is taken: %s", wanted, error)
            await web.TCPSite(self._runner, self._host, 0).start()
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._host in _LOCAL_NAMES:
            if urlsplit(f"//{request.host}").hostname not in _LOCAL_NAMES:
                text = f"{request.host} does not name this page: open http://127.0.0.1 or localhost"
                return _json({"message": text}, status=403)
        elif not self._is_open(request):
            try:
                self._require(_token(request))
            except TokenError as error:
                return _json({"message": str(error)}, status=401)
        return None

    def _is_open(self, request: web.Request) -> bool:
        """Return whether the request needs no token: the page itself holds no data of the run."""
        is_own = request.remote == self._host
        return request.path == "/" or (request.path == "/metrics" and is_own)

    async def _get_page(self, _request: web.Request) -> web.Response:
        return _html(live_page())

    async def _get_report(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            return _html(await self._live.report())
        except (OrchestratorError, StorageError) as error:
            return web.Response(status=503, text=f"the run directory cannot be read now: {error}")

    async def _get_document(self, request: web.Request) -> web.Response:
        """Return the page's document, or only that the browser's copy is current."""
        from aiohttp import web

        document = await self._live.document()
        # The clock is not in the document: otherwise every answer would be a new one.
        headers = {
            "ETag": self._live.tag,
            "Everstep-At": f"{self._live.at_s():.1f}",
            "Cache-Control": "no-cache",
        }
        if request.headers.get("If-None-Match") == self._live.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=document, content_type="application/json", headers=headers)

    async def _get_log(self, request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            asked = [max(0, int(request.query.get(name, "0"))) for name in ("attempt", "rank")]
            text = await self._live.log(*asked)
        except ValueError as error:
            return web.Response(status=400, text=f"attempt and rank must be numbers: {error}")
        except StorageError as error:
            return web.Response(status=503, text=f"the storage does not answer: {error}")
        return web.Response(text=text)

    async def _post_action(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            body = await request.text()
            what = json.loads(body) if body else {}
            message = await self._act(name, _token(request), what if isinstance(what, dict) else {})
        except TokenError as error:
            return _json({"message": str(error)}, status=403)
        except (OrchestratorError, ValueError) as error:
            return _json({"message": str(error)}, status=400)
        return _json({"message": message})

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _json(self._status())

    async def _get_losses(self, _request: web.Request) -> web.Response:
        return _json(await self._losses())

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        # Making the text for hundreds of workers takes longer than the run's loop may wait.
        body = await asyncio.to_thread(self._metrics.prepare())
        return web.Response(body=body, content_type="text/plain", charset="utf-8")


def _token(request: web.Request) -> str:
    header = request.headers.get("Authorization", "")
    return header.removeprefix(_SCHEME) if header.startswith(_SCHEME) else ""


def _html(text: str) -> web.Response:
    from aiohttp import web

    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return web.Response(text=text, content_type="text/html", headers=headers)


def _json(document: dict[str, Any], *, status: int = 200) -> web.Response:
    from aiohttp import web

    return web.json_response(document, status=status)
