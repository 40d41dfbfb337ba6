"""The metadata services of three clouds, as their documents describe them, for a test to speak as.

    python -m tests.support.metadata_server FOLDER HOST PORT

Each machine is told what lies in ``FOLDER/ADDRESS``, by its own address. A file holds one answer;
its name is the path, with ``+`` for ``/``.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
AZURE_NAME = "/metadata/instance/compute/name"
AZURE_EVENTS = "/metadata/scheduledevents"


class Metadata(ThreadingHTTPServer):
    """A server that answers from the files in a folder."""

    daemon_threads = True

    def __init__(self, folder: Path, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, _Handler)
        self.folder = folder
        #: How many tokens AWS has given; only the last one counts.
        self.num_tokens = 0
        #: Whether Google takes no ETag that it gave.
        self.refuses_etags = False
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        """Return what the key ``notices.endpoint`` takes."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def say(self, path: str, text: str | None, machine: str = "127.0.0.1") -> None:
        """Answer ``text`` to a machine that asks for ``path``; None: there is nothing."""
        say(self.folder, path, text, machine)

    def answer(self, path: str, machine: str) -> str | None:
        """Return what a machine is told."""
        try:
            return _file(self.folder, path, machine).read_text()
        except FileNotFoundError:
            return None


def say(folder: Path, path: str, text: str | None, machine: str) -> None:
    """Have the server of ``folder`` answer ``text`` to a machine that asks for ``path``."""
    file = _file(folder, path, machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        file.unlink(missing_ok=True)
    else:
        written = file.with_suffix(".part")
        written.write_text(text)
        written.rename(file)


def _file(folder: Path, path: str, machine: str) -> Path:
    return folder / machine / path.replace("/", "+")


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        if self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in (
            self.headers
        ):
            self.server.num_tokens += 1
            self._send(200, f"token-{self.server.num_tokens}")
        else:
            self._send(400, "")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        asked = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        refused = self._refused(asked.path, query)
        if refused:
            self._send(refused, "")
            return
        text = self._said(asked.path)
        deadline_s = time.monotonic() + float(query.get("timeout_sec", 0))
        while (
            "wait_for_change" in query
            and _etag(text) == query.get("last_etag")
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.01)
            text = self._said(asked.path)
        self._send(404 if text is None else 200, text or "", etag=_etag(text))

    def _refused(self, path: str, query: dict[str, str]) -> int:
        """Return with which status, 0 if what is needed came with the question."""
        if path.startswith("/latest/"):
            token = f"token-{self.server.num_tokens}"
            return 0 if self.headers.get("X-aws-ec2-metadata-token") == token else 401
        if path.startswith("/computeMetadata/"):
            if self.server.refuses_etags and "last_etag" in query:
                return 400
            return 0 if self.headers.get("Metadata-Flavor") == "Google" else 403
        return 0 if self.headers.get("Metadata") == "true" and "api-version" in query else 400

    def _said(self, path: str) -> str | None:
        return self.server.answer(path, str(self.client_address[0]))

    def _send(self, status: int, text: str, *, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _etag(text: str | None) -> str:
    return (text or "").encode().hex()[:16] or "0"


@contextmanager
def serve(folder: Path) -> Iterator[Metadata]:
    """Serve on this machine, in a thread."""
    with Metadata(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    Metadata(Path(sys.argv[1]), (sys.argv[2], int(sys.argv[3]))).serve_forever()
