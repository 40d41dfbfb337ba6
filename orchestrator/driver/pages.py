"""Where the page of a run is, and an index of the pages of all runs."""

from __future__ import annotations

import html
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError
from orchestrator.run_directory import TOKEN
from ucp_core.storage import join

#: A browser asks for the index again after this.
LOOK_S = 5.0
_LOOPBACK = ("127.0.0.1", "::1")
_COLUMNS = ("run", "phase", "step", "workers", "cluster", "note")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>everstep runs</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{look_s:g}"><link rel="icon" href="data:,">
<style>:root {{ color-scheme: light dark }} body {{ font: 15px/1.5 system-ui, sans-serif;
margin: 24px auto; max-width: 1100px; padding: 0 16px }} table {{ border-collapse: collapse;
width: 100% }} th, td {{ text-align: left; padding: 6px 14px 6px 0; overflow-wrap: anywhere;
border-bottom: 1px solid #8884 }}</style></head><body><h1>Runs</h1>{content}</body></html>
"""


def open_page(url: str, *, browser: bool = False) -> dict[str, str]:
    """Return where the page of the run in ``url`` is, and how to reach it from elsewhere.

    With ``browser`` the page is opened, where there is a browser that reaches it.

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
    # Only the machine of the controller reaches its loopback.
    gate = contact["ray_address"].rpartition(":")[0]
    answers = run.ask("status") is not None
    if host not in _LOOPBACK and not answers:
        raise CapacityError(
            f"the controller does not answer at {page} from here; it is on {gate}: "
            f"ssh -N -L {port}:{host}:{port} {gate} leads there, or ask again if it restarts",
            address=page,
        )
    if browser and answers and _has_screen():
        webbrowser.open(page)
    pod = f"kubectl port-forward POD {port}:{port}"
    needs = "" if host in _LOOPBACK else "  (needs cluster.metrics_host: loopback)"
    return {
        "page": page,
        "tunnel": f"ssh -N -L {port}:{host}:{port} {gate}  (then http://127.0.0.1:{port}/)",
        "kubernetes": f"{pod}  (the pod of the Ray head){needs}",
        "token": join(url, TOKEN),
    }


def _has_screen() -> bool:
    """Return whether a browser would have a window: one in a terminal cannot show the page."""
    windows = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, windows))


class RunIndex:
    """Serves an index of runs at ``address``, on this machine only.

    Args:
        port: 0 takes a free one.
    """

    def __init__(self, port: int) -> None:
        self._pages = [index_page(())]
        pages = self._pages

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = pages[-1].encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
                """Print nothing: a browser asks every few seconds."""

        self._server = ThreadingHTTPServer((_LOOPBACK[0], port), Handler)
        self.address = f"http://{_LOOPBACK[0]}:{self._server.server_port}/"

    def serve(
        self, runs: Callable[[], Sequence[Mapping[str, Any]]], *, pause: Callable[[], None]
    ) -> None:
        """Show what ``runs`` returns, again and again, until ``pause`` raises.

        ``runs`` is called in this thread: Ray connects in one thread.
        """
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            while True:
                self._pages[:] = [index_page(runs())]
                pause()
        finally:
            self._server.shutdown()
            self._server.server_close()


def index_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the index as HTML; ``runs`` as ``list_runs`` returns them."""
    rows = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(run))}</tr>" for run in runs
    )
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    content = f"<table><tr>{head}</tr>{rows}</table>" if runs else "<p>No runs yet.</p>"
    return _PAGE.format(look_s=LOOK_S, content=content)


def _cells(run: Mapping[str, Any]) -> list[str]:
    name = html.escape(run["directory"] or "-")
    page = run.get("page")
    link = f'<a href="{html.escape(page)}">{name}</a>' if page else name
    rest = (run["phase"], run["step"], run["workers"], run["address"], run["note"])
    return [link, *("-" if cell in (None, "") else html.escape(str(cell)) for cell in rest)]
