"""The keeper's descriptor server, which gives the node's arenas to the processes of the node.

``workers.memory.descriptors`` is the client, and describes the protocol.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.errors import ArenaError
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import accepted
from workers.memory import ANSWER_S, PACKET_BYTES, notice_socket, owner_of


class DescriptorServer:
    """Gives out the arenas in ``table`` at ``path``, in its own threads, until ``close``.

    ``on_refused`` is called with the owner (``owner_of``) of a reservation and the reason for
    refusing it; "" once it is granted.
    """

    def __init__(
        self,
        path: Path,
        table: ArenaTable,
        on_refused: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._table = table
        self._on_refused = on_refused
        self._closed = False
        # Trainers identify a keeper by this socket, so it comes first. If the keeper accepted
        # notices earlier, trainers would take it for its predecessor and not give it their memory.
        self._listener = bind_socket(path, socket.SOCK_SEQPACKET)
        self._notices = bind_socket(notice_socket(path), socket.SOCK_DGRAM)
        self._listener.listen(64)
        self._threads = [
            threading.Thread(target=self._serve, name="descriptors", daemon=True),
            threading.Thread(target=self._read_notices, name="notices", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._notices.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._notices.close()

    def _read_notices(self) -> None:
        while self._notices.recv(PACKET_BYTES) or not self._closed:
            self._table.tell()

    def _serve(self) -> None:
        for connection in accepted(self._listener, lambda: self._closed):
            try:
                # Each client has its own thread, so that a client that is stopped half-way does not
                # block the others.
                threading.Thread(
                    target=self._receive_client,
                    args=(connection,),
                    name="descriptor-client",
                    daemon=True,
                ).start()
            except RuntimeError:
                # Out of threads: the client tries again.
                connection.close()

    def _receive_client(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(ANSWER_S)
            packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
            given: list[int] = []
            try:
                given = self._do(json.loads(packet), fds)
                socket.send_fds(connection, [b'{"ok": {}}'], given)
            except (ArenaError, KeyError, TypeError, ValueError) as error:
                connection.send(json.dumps({"refused": str(error)[:2000]}).encode())
            finally:
                for fd in given + fds:
                    os.close(fd)

    def _do(self, request: Any, fds: list[int]) -> list[int]:
        """Serve a request, and return the descriptors to send; remove the ``fds`` that are kept."""
        do, name = str(request["do"]), str(request["arena"])
        if do == "reserve":
            self._reserve(name, int(request["body_bytes"]), int(request["attempt"]))
            return [self._table.hand_out(name)]
        if do == "open":
            return [self._table.hand_out(name)]
        if do == "adopt":
            if len(fds) != 1:
                raise ArenaError("adopt comes with one file descriptor", arena=name)
            self._table.adopt(name, fds[0])
            fds.clear()
            return []
        if do == "leave":
            self._table.leave(name)
            # A refused reservation for this owner no longer matters.
            self._on_refused(owner_of(name), "")
            return []
        raise ArenaError(f"unknown request {do!r}")

    def _reserve(self, name: str, body_bytes: int, attempt: int) -> None:
        if attempt < self._table.attempt:
            raise ArenaError(
                f"attempt {attempt} is over, attempt {self._table.attempt} has begun", arena=name
            )
        try:
            self._table.reserve(name, body_bytes=body_bytes)
        except ArenaError as error:
            self._on_refused(owner_of(name), str(error))
            raise
        self._on_refused(owner_of(name), "")


def bind_socket(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a socket that is bound to ``path``, in place of an old one."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, kind)
    bound.bind(str(path))
    os.chmod(path, 0o600)  # noqa: PTH101  the socket, before anybody can connect
    return bound
