"""The address of a run's page, and an index of the pages of all runs."""

import contextlib
import json
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config import load
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, OrchestratorError
from orchestrator.report import SUMMARY, TOKEN, RunRecord, Scale, live_page, numbers_of, thin
from ucp_core.errors import UcpError
from ucp_core.storage import join

LOOPBACK = "127.0.0.1"
_LOOPBACKS = (LOOPBACK, "::1")
#: How many finished runs the list shows, and how many points of each curve.
_OVER_MAX, _POINTS_MAX = 40, 200
#: Keys of a run that its card shows.
_SHOWN = ("goal", "step", "outcome", "num_workers", "lost_steps", "eta_s")


def open_page(url: str, *, browser: bool = False) -> dict[str, str]:
    """Return the address of the page of the run in ``url``, and how to reach it from elsewhere.

    With ``browser`` the page is opened if a browser can reach it.

    Keys: ``page``, ``tunnel`` (a command for another machine), ``kubernetes`` (one for a cluster of
    pods), ``token`` (the file that actions need).

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: Its controller does not answer.
    """
    run = Run(url)
    contact = run.live_contact()
    page = f"{contact['url']}/"
    where = urlsplit(page)
    host, port = where.hostname or "", where.port
    # Only the controller's machine reaches its loopback.
    gate = contact["ray_address"].rpartition(":")[0]
    answers = run.ask("status") is not None
    if host not in _LOOPBACKS and not answers:
        raise CapacityError(
            f"the controller does not answer at {page} from here; it is on {gate}: use ssh -N "
            f"-L {port}:{host}:{port} {gate}, or ask again if it restarts",
            address=page,
        )
    # A browser in the terminal cannot show the page.
    windows = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    has_screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, windows))
    if browser and answers and has_screen:
        webbrowser.open(page)
    pod = f"kubectl port-forward POD {port}:{port}"
    needs = "" if host in _LOOPBACKS else "  (needs cluster.metrics_host: loopback)"
    return {
        "page": page,
        "tunnel": f"ssh -N -L {port}:{host}:{port} {gate}  (then http://127.0.0.1:{port}/)",
        "kubernetes": f"{pod}  (the pod of the Ray head){needs}",
        "token": join(url, TOKEN),
    }


class RunIndex:
    """Serves a page of all runs at ``address``, on this machine only; port 0 picks a free one.

    Raise ``CapacityError`` if another process uses the port.
    """

    def __init__(self, port: int) -> None:
        self._documents = [_encoded([])]
        documents = self._documents

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
                is_page, is_own = self.path == "/", host in (LOOPBACK, "localhost")
                self.send_response(200 if is_own else 403)
                kind = "text/html; charset=utf-8" if is_page else "application/json"
                body = (live_page().encode() if is_page else documents[-1]) if is_own else b""
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
                """Print nothing: a browser asks every few seconds."""

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            raise CapacityError(
                f"port {port} cannot be used for the list: {error.strerror}; name another one "
                "by --port, or none for a free one",
                port=port,
            ) from error
        self.address = f"http://{LOOPBACK}:{self._server.server_port}/"

    def serve(
        self, runs: Callable[[], Sequence[Mapping[str, Any]]], *, pause: Callable[[], None]
    ) -> None:
        """Show the result of ``runs``, repeatedly, until ``pause`` raises.

        ``runs`` is called in this thread, because Ray connects in one thread only.
        """
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        over: dict[str, dict[str, Any]] = {}
        try:
            while True:
                self._documents[:] = [_encoded(run_cards(runs(), over))]
                pause()
        finally:
            self._server.shutdown()
            self._server.server_close()


def run_cards(
    rows: Sequence[Mapping[str, Any]], over: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what the page shows of each run: live runs, then finished ones.

    Args:
        rows: As ``list_runs`` returns them. Finished runs are found in the folders of these runs,
            and in ``runs`` of the working directory.
        over: Cards of finished runs, which are not read again.
    """
    cards = [_card(row["directory"] or row["address"], row) for row in rows]
    known = {card["url"] for card in cards}
    parents = {str(Path(url).parent) for url in known if "://" not in url and Path(url).is_dir()}
    folders = {*parents, str(Path("runs").resolve())}
    beside = [path.parent for one in folders for path in Path(one).glob(f"*/{SUMMARY}")]
    for path in sorted(beside, key=lambda path: -path.stat().st_mtime)[:_OVER_MAX]:
        url = str(path)
        if url not in known:
            over.setdefault(url, _card(url, {"page": None, "note": ""}))
            cards.append(over[url])
    return cards


def _card(url: str, row: Mapping[str, Any]) -> dict[str, Any]:
    card = {"url": url, "name": Path(url).name or url, **row, "loss": []}
    with contextlib.suppress(UcpError, OrchestratorError):
        run = RunRecord(url)
        goal = load(run.config_text).train.steps
        numbers = numbers_of(run.stats, Scale(goal=goal, samples=0, tokens=0))
        card |= {name: numbers[name] for name in _SHOWN}
        card["num_incidents"] = len(run.all_incidents)
        card["loss"] = thin(run.curves.loss, _POINTS_MAX)
    return card


def _encoded(cards: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps({"runs": cards}, separators=(",", ":")).encode()
