"""Commands with the address of something else than a head: one line, within seconds."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from orchestrator.shell import connect_ray
from tests.support.run_command import EVERSTEP


def _as_dashboard(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@contextmanager
def _listening(serve: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """Yield the address of a server; without ``serve`` it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def accept() -> None:
            while not is_over.is_set():
                connection, _ = server.accept()
                with connection:
                    if serve is not None and not is_over.is_set():
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        if serve is not None:
            thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            is_over.set()
            if serve is not None:
                socket.create_connection(server.getsockname()).close()
                thread.join()


@pytest.mark.parametrize("serve", [None, _as_dashboard], ids=["silent", "http"])
def test_a_port_of_something_else_is_named(serve: Callable[[socket.socket], None] | None) -> None:
    """Ray itself asks for 40 s, and logs meanwhile. A proxy may answer in the place of the head."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment["http_proxy"] = "http://proxy.example:3128"
    began_s = time.monotonic()
    with _listening(serve) as address:
        done = subprocess.run(
            [*EVERSTEP, "list", "--address", address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.returncode == 3
    assert time.monotonic() - began_s < 30
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()  # and none of gRPC or Ray, which was not asked
    assert ("it does not speak gRPC" if serve else "nothing came in 3 s") in line
    assert f"no Ray cluster answers at {address}: something answers, but not the head" in line
    assert "6379" in line
    assert "http_proxy is set, and no_proxy lacks this host" in line


@pytest.mark.parametrize("address", ["foo", "http://127.0.0.1:8265"])
def test_what_is_no_address_is_refused_in_one_line(address: str) -> None:
    """Ray raises ValueError, in one case over several lines."""
    with pytest.raises(ConnectionError, match="an address is HOST:PORT") as caught:
        connect_ray(address)

    assert "\n" not in str(caught.value)
