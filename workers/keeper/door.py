"""The keeper's door: a unix socket on which the processes of its node get at its memory.

One request a connection, one packet each way: a JSON object, and a file descriptor where memory
changes hands. Only processes of the same user on the same machine can come in, nothing is
unpickled, and nothing but memory goes through: what is in it, the arenas say themselves.

    {"do": "reserve", "worker": "w0007", "body_bytes": 123456}  ->  {"ok": {}}  + fd
    {"do": "open", "worker": "w0007"}                           ->  {"ok": {}}  + fd
    {"do": "adopt", "worker": "w0007"}  + fd                    ->  {"ok": {}}
    {"do": "drop", "worker": "w0007"}                           ->  {"ok": {}}
    anything that cannot be done                                ->  {"refused": "why, what to do"}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Final

from workers.errors import ArenaError
from workers.keeper.arena import NUM_SLOTS, Arena
from workers.protocol import Held

__all__ = ["DOOR", "Door", "Shelf", "adopt", "door_path", "drop", "open_arena", "reserve"]

#: Name of the socket in the directory of a node's pages and rings.
DOOR: Final = "door"
_PACKET_BYTES: Final = 4096
#: Memory of a gigabyte a slot is faulted in at about 10 GB/s, and refused at once.
_ANSWER_S: Final = 60.0


def door_path(directory: Path) -> Path:
    """Return where the keeper that works in ``directory`` has its door."""
    return directory / DOOR


class Shelf:
    """The arenas of one node by worker, within a budget. Safe to call from several threads.

    Args:
        budget_bytes: Memory that all arenas together may take.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._arenas: dict[str, Arena] = {}
        self._lock = threading.Lock()

    def reserve(self, worker: str, *, body_bytes: int) -> Arena:
        """Return the worker's arena; a new one if it has none, or one whose slots are too small.

        Raises:
            ArenaError: It does not fit into the budget, or into memory.
        """
        with self._lock:
            held = self._arenas.get(worker)
            if held is not None and held.body_bytes >= body_bytes:
                return held
            used = sum(_size_bytes(a) for w, a in self._arenas.items() if w != worker)
            need = NUM_SLOTS * body_bytes
            if used + need > self._budget_bytes:
                raise ArenaError(
                    f"snapshots of {worker} need {need} bytes ({NUM_SLOTS} of {body_bytes}); "
                    f"{used} of the node's {self._budget_bytes} are taken: raise the snapshot "
                    "budget, or put fewer workers on a node",
                    worker=worker,
                    need_bytes=need,
                    budget_bytes=self._budget_bytes,
                )
            arena = Arena.create(worker, body_bytes=body_bytes)
            self._put(worker, arena)
            return arena

    def adopt(self, worker: str, fd: int) -> None:
        """Take in an arena that a worker still holds; after a restart the shelf is empty.

        Raises:
            ArenaError: The file is no arena.
        """
        with self._lock:
            self._put(worker, Arena(fd))

    def arena(self, worker: str) -> Arena | None:
        """Return the worker's arena, if it has one."""
        with self._lock:
            return self._arenas.get(worker)

    def drop(self, worker: str) -> None:
        """Let go of the worker's arena; its memory is free once nobody else holds it."""
        with self._lock:
            self._put(worker, None)

    def versions(self) -> dict[str, list[Held]]:
        """Return what is held, by worker, oldest first."""
        with self._lock:
            return {worker: arena.versions() for worker, arena in sorted(self._arenas.items())}

    def _put(self, worker: str, arena: Arena | None) -> None:
        held = self._arenas.pop(worker, None)
        if held is not None:
            held.close()
        if arena is not None:
            self._arenas[worker] = arena


class Door:
    """Serves ``shelf`` at ``path`` in a thread of its own until ``close``."""

    def __init__(self, path: Path, shelf: Shelf) -> None:
        path.unlink(missing_ok=True)
        self._shelf = shelf
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)  # noqa: PTH101  the socket, before anybody can connect
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET_BYTES, 1)
        try:
            given = self._do(json.loads(packet), fds)
        except (ArenaError, KeyError, TypeError, ValueError) as error:
            for fd in fds:
                os.close(fd)
            connection.send(json.dumps({"refused": str(error)[:2000]}).encode())
            return
        socket.send_fds(connection, [b'{"ok": {}}'], [given.fd] if given is not None else [])

    def _do(self, request: Any, fds: list[int]) -> Arena | None:
        do, worker = str(request["do"]), str(request["worker"])
        if do == "reserve":
            return self._shelf.reserve(worker, body_bytes=int(request["body_bytes"]))
        if do == "open":
            arena = self._shelf.arena(worker)
            if arena is None:
                raise ArenaError(f"no snapshot of {worker} is held on this node", worker=worker)
            return arena
        if do == "adopt":
            if len(fds) != 1:
                raise ArenaError("adopt comes with one file descriptor", worker=worker)
            self._shelf.adopt(worker, fds[0])
            return None
        if do == "drop":
            self._shelf.drop(worker)
            return None
        raise ArenaError(f"unknown request {do!r}")


def reserve(path: Path, worker: str, *, body_bytes: int) -> Arena:
    """Return the arena of ``worker``, from the keeper behind ``path``; it outlives this process.

    Raises:
        ArenaError: The keeper refuses, or is not there.
    """
    arena = _arena(_ask(path, {"do": "reserve", "worker": worker, "body_bytes": body_bytes}))
    arena.populate()
    return arena


def open_arena(path: Path, worker: str) -> Arena:
    """Return the arena of another worker of the node, to read from.

    Raises:
        ArenaError: The keeper has none, or is not there.
    """
    return _arena(_ask(path, {"do": "open", "worker": worker}))


def adopt(path: Path, worker: str, arena: Arena) -> None:
    """Hand an arena to a keeper that does not know it: it was restarted.

    Raises:
        ArenaError: The keeper is not there.
    """
    _ask(path, {"do": "adopt", "worker": worker}, fds=[arena.fd])


def drop(path: Path, worker: str) -> None:
    """Have the keeper let go of the arena of ``worker``.

    Raises:
        ArenaError: The keeper is not there.
    """
    _ask(path, {"do": "drop", "worker": worker})


def _ask(path: Path, request: dict[str, Any], fds: list[int] | None = None) -> list[int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [json.dumps(request).encode()], fds or [])
            packet, received, _, _ = socket.recv_fds(connection, _PACKET_BYTES, 1)
            answer = json.loads(packet)
        except (OSError, ValueError) as error:
            raise ArenaError(
                f"the keeper does not answer at {path}: {error}", path=str(path)
            ) from error
    if "refused" in answer:
        raise ArenaError(answer["refused"], **{k: v for k, v in request.items() if k != "do"})
    return received


def _arena(fds: list[int]) -> Arena:
    if len(fds) != 1:
        raise ArenaError("the keeper answered without memory")
    return Arena(fds[0])


def _size_bytes(arena: Arena) -> int:
    return NUM_SLOTS * arena.body_bytes
