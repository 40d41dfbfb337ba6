"""Object stores that really listen: server processes, and a proxy that makes them fail."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.failing_store import DiedError, Fate

_START_S_MAX = 240.0
#: Clients of s3fs, by the URL that they speak to.
_CLIENTS: dict[str, dict[str, Any]] = {}
#: Headers of a single connection, not of the next hop.
_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "host", "expect"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def served(log: Path, command: Callable[[int], list[str]], probe: str) -> Iterator[str]:
    """Run a server as a process of its own; yield its URL once it answers."""
    with _running(log, command, probe) as (url, _):
        yield url


@contextmanager
def _running(
    log: Path, command: Callable[[int], list[str]], probe: str
) -> Iterator[tuple[str, int]]:
    """Do as ``served``; yield the id of the process, too."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command(port), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S_MAX
        while not _answers(url + probe):
            assert process.poll() is None, f"the server ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"no answer: {log.read_text()}"
            time.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def s3_server(log: Path) -> AbstractContextManager[str]:
    """Return moto's S3, which asks for no credentials until it is told to."""
    return served(log, _moto, "/moto-api/")


def s3_process(log: Path) -> AbstractContextManager[tuple[str, int]]:
    """Return the same, and the id of its process: to be stopped."""
    return _running(log, _moto, "/moto-api/")


def _moto(port: int) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def gcs_server(log: Path, bucket: str) -> AbstractContextManager[str]:
    """Return an emulator of Google's storage that has one bucket and keeps all in memory."""
    module = "gcp_storage_emulator.__main__"
    start = ["start", "--host", "127.0.0.1", "--in-memory", "--default-bucket", bucket]
    return served(
        log, lambda port: [sys.executable, "-m", module, *start, "--port", str(port)], "/"
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310  our own, on this machine
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The proxy's action on requests that match, ``times`` times."""

    method: str  #: HTTP method.
    within: str = ""  #: Is part of the path and query.
    times: int = 1  #: How often; the following ones pass.
    #: Share of the matching requests; the same in every run if they come in one order.
    share: float = 1.0
    status: int = 0  #: Answered instead of the server; 0: the connection breaks.
    code: str = "SlowDown"  #: S3's name of the error.
    after: bool = False  #: The server gets the request first, so that only its answer is lost.
    doubles: bool = False  #: The server gets the request twice, and its second answer comes.
    delay_s: float = 0.0  #: The request is passed on after so long, and nothing else happens to it.


@dataclass
class Proxy:
    """The requests that a proxy saw, and its orders."""

    url: str  #: URL of the proxy.
    #: The first one that matches and is not used up is applied.
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  #: ``METHOD path?query`` of every request.
    #: Where requests to read wait for one another, if at all.
    meeting: threading.Barrier | None = None
    fate: Fate | None = None  #: When the one behind it dies, if at all: then it stops answering.
    _used: dict[Fault, int] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_of(self, method: str, target: str) -> Fault | None:
        """Note a request and return what shall happen to it."""
        with self._lock:
            self.seen.append(f"{method} {target}")
            for fault in self.faults:
                if fault.method == method and fault.within in target:
                    used = self._used.get(fault, 0)
                    if used < fault.times and self._random.random() < fault.share:
                        self._used[fault] = used + 1
                        return fault
        return None

    def count(self, method: str, within: str = "") -> int:
        """Return how many requests were seen."""
        return sum(s.startswith(f"{method} ") and within in s for s in self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fate = self.server.proxy.fate
        if fate is not None and (fate.is_dead or self.command in {"PUT", "POST", "DELETE"}):
            try:
                self._answer(*fate.change(lambda: self._passed(body)))
            except DiedError:
                self._break()
            return
        fault = self.server.proxy.fault_of(self.command, self.path)
        if self.server.proxy.meeting is not None and self.command == "GET":
            self.server.proxy.meeting.wait()
        if fault is None or fault.doubles or fault.delay_s:
            if fault is not None and fault.doubles:
                self._passed(body)
            time.sleep(fault.delay_s if fault is not None else 0.0)
            self._answer(*self._passed(body))
            return
        if fault.after:
            self._passed(body)
        if fault.status == 0:
            self._break()
        else:
            text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
            self._answer(fault.status, [("Content-Type", "text/xml")], text.encode())

    def _break(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815

    def _passed(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(self.server.behind, timeout=30)
        try:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
            # The signature covers the host that the client believes it speaks to.
            kept["Host"] = self.headers["Host"]
            connection.request(self.command, self.path, body, kept)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in _HOP_HEADERS or (is_head and name.lower() == "content-length"):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's
        """Write no log."""


class _Listener(ThreadingHTTPServer):
    proxy: Proxy
    behind: str


@contextmanager
def proxied(
    server_url: str, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Callable[[], Proxy]]:
    """Pass requests on to ``server_url``, but for the faults; yield what begins a new proxy.

    All of them have one URL. The earlier one no longer sees or spoils anything.
    """
    listener = _Listener((host, port), _Handler)
    listener.behind = server_url.removeprefix("http://")

    def begin() -> Proxy:
        listener.proxy = Proxy(f"http://{host}:{listener.server_port}")
        return listener.proxy

    begin()
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def use_s3(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Say by the environment, as a user would, where S3 is.

    fsspec keeps clients by their arguments, and the environment is none. So each URL has clients of
    its own, which tests share: a new one reads a megabyte of descriptions of the service.
    """
    monkeypatch.setattr("s3fs.S3FileSystem._cache", _CLIENTS.setdefault(url, {}))
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
