"""A process beside the keeper that only holds its memory: it outlives keeper and trainer together.

An arena lives as long as somebody has it open. Usually that is the trainer that writes it and
the keeper; where both may die at once and no peer has a copy, this process holds it as well. It
is small, does nothing but wait, and ends by itself, so that no memory is left behind: at once
when the keeper tells it to, or some time after a keeper died and no other one came.

Packets on its unix socket are JSON with at most one file descriptor. To a keeper that comes:

    {"held": "w0007.1"}  + fd     one for each arena, then {"held": ""}

From the keeper:

    {"hold": "w0007.1"}  + fd     {"let_go": "w0007.1"}     {"end": true}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

__all__ = ["VAULT", "Vault", "serve"]

#: Name of the socket in the directory of a node's pages and rings.
VAULT: Final = "vault"
#: A keeper that died is back within a few seconds, or its node was given up.
GRACE_S: Final = 30.0
_PACKET_BYTES: Final = 4096
#: To start a Python process takes 0.1 s, several times that beside saturated trainers.
_START_S_MAX: Final = 20.0
_LOOK_S: Final = 0.02
#: It is idle; if it does not take a packet at once, it is stopped.
_SEND_S_MAX: Final = 2.0


class Vault:
    """The keeper's end. Safe to call from several threads.

    Args:
        directory: Of the node's pages and rings.

    Attributes:
        recovered: What a keeper that died had, by name: file descriptors, to be taken over.

    Raises:
        OSError: There is no such process, and none could be started.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / VAULT
        self._lock = threading.Lock()
        self._pid = 0
        connection = _connect(path)
        if connection is None:
            self._pid = _start(path)
            connection = _wait_for(path)
        self._connection = connection
        self._connection.settimeout(_START_S_MAX)
        self.recovered: dict[str, int] = {}
        while True:
            packet, fds = _receive(self._connection)
            if not packet.get("held"):
                break
            self.recovered[packet["held"]] = fds[0]
        self._connection.settimeout(_SEND_S_MAX)

    def note(self, name: str, fd: int | None) -> None:
        """Have an arena held, or let go of if there is no file descriptor.

        Raises:
            OSError: The process is gone.
        """
        packet = {"let_go": name} if fd is None else {"hold": name}
        with self._lock:
            _send(self._connection, packet, fd)

    def end(self) -> None:
        """Have it let go of everything, and end."""
        with self._lock, contextlib.suppress(OSError):
            _send(self._connection, {"end": True}, None)
            # It closes its end when it is done.
            self._connection.recv(_PACKET_BYTES)
            if self._pid:
                os.waitpid(self._pid, 0)
        self._connection.close()


def serve(path: Path, *, grace_s: float) -> None:
    """Hold what one keeper after the other hands over; return when it is time to end.

    Or at once where another process does: a keeper that was killed had started that one.
    """
    other = _connect(path)
    if other is not None:
        other.close()
        return
    held: dict[str, int] = {}
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # noqa: PTH101  the socket, before anybody can connect
        listener.listen(4)
        listener.settimeout(grace_s)
        is_over = False
        while not is_over:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            with connection:
                is_over = _accompany(connection, held)
    path.unlink(missing_ok=True)


def _accompany(connection: socket.socket, held: dict[str, int]) -> bool:
    """Serve one keeper as long as it lives; return whether this process is to end."""
    try:
        for name, fd in held.items():
            _send(connection, {"held": name}, fd)
        _send(connection, {"held": ""}, None)
        while True:
            packet, fds = _receive(connection)
            if "end" in packet:
                return True
            name = packet.get("hold") or packet["let_go"]
            # Memory that is handed on has its new name first: the keeper may be killed in between.
            old = [each for each, fd in held.items() if fds and os.path.sameopenfile(fd, fds[0])]
            for each in {name, *old} & held.keys():
                os.close(held.pop(each))
            if fds:
                held[name] = fds[0]
    except (OSError, ValueError, KeyError):
        # It died; the next one may come.
        return False


def _start(path: Path) -> int:
    """Start a process that serves ``path`` and return its id."""
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", __name__, str(path)],
        {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        file_actions=nothing,
        # Whoever ends the keeper's session must not end this.
        setsid=True,
    )


def _wait_for(path: Path) -> socket.socket:
    end_s = time.monotonic() + _START_S_MAX
    while True:
        connection = _connect(path)
        if connection is not None:
            return connection
        if time.monotonic() > end_s:
            raise TimeoutError(f"nobody serves {path} after {_START_S_MAX:.0f} s")
        time.sleep(_LOOK_S)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _send(connection: socket.socket, packet: dict[str, Any], fd: int | None) -> None:
    fds = [] if fd is None else [fd]
    socket.send_fds(connection, [json.dumps(packet).encode()], fds)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, fds, _, _ = socket.recv_fds(connection, _PACKET_BYTES, 1)
    if not data:
        raise ConnectionResetError("the other end is gone")
    return json.loads(data), fds


if __name__ == "__main__":
    serve(Path(sys.argv[1]), grace_s=GRACE_S)
