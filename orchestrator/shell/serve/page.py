"""The controller's HTTP page: ``/status`` for tools, ``/metrics`` for Prometheus.

``everstep plan`` asks for ``/losses``.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)


class StatusPage:
    """Serves read-only documents about the run.

    Args:
        port: Port to listen on; 0 takes a free one, and so does a port that is in use.
        status: Returns the JSON document of ``/status``.
        losses: Returns that of ``/losses``; may wait for answers of keepers.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        status: Callable[[], dict[str, Any]],
        losses: Callable[[], Awaitable[dict[str, Any]]],
        metrics: Collector,
    ) -> None:
        self._host = host
        self._port = port
        self._status = status
        self._losses = losses
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Start to serve; return the page's URL."""
        # In a thread: the import takes 0.1 s or more, and the run's loop must not wait.
        await asyncio.to_thread(importlib.import_module, "aiohttp.web")
        from aiohttp import web

        app = web.Application()
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/losses", self._get_losses)
        app.router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            # Two runs may share a machine; a run must not end for its metrics.
            log.warning("port_in_use", extra={"port": self._port, "error": str(error)})
            await web.TCPSite(self._runner, self._host, 0).start()
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _json(self._status())

    async def _get_losses(self, _request: web.Request) -> web.Response:
        return _json(await self._losses())

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(
            body=generate_latest(self._registry), content_type="text/plain", charset="utf-8"
        )


def _json(document: dict[str, Any]) -> web.Response:
    from aiohttp import web

    return web.json_response(document)
