"""The keeper's door: a unix socket on which the processes of its node get at its memory.

One request a connection, one packet each way: a JSON object, and a file descriptor where memory
changes hands. Only processes of the same user on the same machine can come in, nothing is
unpickled, and nothing but memory goes through: what is in it, the arenas say themselves.

    {"do": "reserve", "arena": "w0007.0", "body_bytes": 123456, "attempt": 3}  ->  {"ok": {}}  + fd
    {"do": "open", "arena": "w0007.0"}                                         ->  {"ok": {}}  + fd
    {"do": "adopt", "arena": "w0007.0"}  + fd                                  ->  {"ok": {}}
    {"do": "leave", "arena": "replica0/w0007.0"}                               ->  {"ok": {}}
    {"do": "drop", "arena": "w0007.0"}                                         ->  {"ok": {}}
    anything that cannot be done                            ->  {"refused": "why, what to do"}

Beside it is a datagram socket for notices, which nobody answers and nobody waits for:

    {"do": "finished", "arena": "w0007.0"}

A notice only says that it is time to look. One that is lost because too many are unread is not
missed: those that are unread make the keeper look later than this one would have.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from workers.errors import ArenaError
from workers.keeper.slots import Shelf
from workers.memory import Arena, owner_of

__all__ = [
    "DOOR",
    "Door",
    "Lease",
    "Shelf",
    "adopt",
    "door_path",
    "drop",
    "leave_arena",
    "notify",
    "open_arena",
    "reserve",
]

#: Name of the socket in the directory of a node's pages and rings, and of that for notices.
DOOR: Final = "door"
_NOTICES: Final = ".notice"
_PACKET_BYTES: Final = 4096
#: To fault in an arena of 100 GB takes half a minute; whatever is refused is refused at once.
_RESERVE_S: Final = 120.0
#: For anything else, at either end: a keeper that is starved is not waited for.
_ANSWER_S: Final = 5.0
#: Where a process may open no more files, it is tried again after this.
_ACCEPT_S: Final = 0.1


def door_path(directory: Path) -> Path:
    """Return where the keeper that works in ``directory`` has its door."""
    return directory / DOOR


class Door:
    """Serves ``shelf`` at ``path`` in threads of its own until ``close``.

    Args:
        path: Of the socket.
        shelf: What there is.
        on_refused: Told whose reservation was refused (``owner_of`` the arena), and why; "" once
            it was not.
    """

    def __init__(
        self, path: Path, shelf: Shelf, on_refused: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self._shelf = shelf
        self._on_refused = on_refused
        self._closed = False
        # First: trainers tell keepers apart by it. One that took notices behind the door of the one
        # before would pass for that one, and be handed nothing.
        self._listener = _bound(path, socket.SOCK_SEQPACKET)
        self._notices = _bound(_notice_path(path), socket.SOCK_DGRAM)
        self._listener.listen(64)
        self._threads = [
            threading.Thread(target=self._serve, name="door", daemon=True),
            threading.Thread(target=self._read_notices, name="door-notices", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._notices.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._notices.close()

    def _read_notices(self) -> None:
        while self._notices.recv(_PACKET_BYTES) or not self._closed:
            self._shelf.tell()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # No descriptor is left, or no memory: whoever comes is let in once there is.
                time.sleep(_ACCEPT_S)
                continue
            try:
                # Not here: one guest that is stopped in the middle must not keep others waiting.
                threading.Thread(
                    target=self._receive_guest, args=(connection,), name="door-guest", daemon=True
                ).start()
            except RuntimeError:
                # No thread is left. It asks again.
                connection.close()

    def _receive_guest(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ANSWER_S)
            packet, fds, _, _ = socket.recv_fds(connection, _PACKET_BYTES, 1)
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
        """Do what is asked for and return the file descriptors to send; it takes what it keeps."""
        do, name = str(request["do"]), str(request["arena"])
        if do == "reserve":
            self._reserve(name, int(request["body_bytes"]), int(request["attempt"]))
            return [self._shelf.hand_out(name)]
        if do == "open":
            return [self._shelf.hand_out(name)]
        if do == "adopt":
            if len(fds) != 1:
                raise ArenaError("adopt comes with one file descriptor", arena=name)
            self._shelf.adopt(name, fds[0])
            fds.clear()
            return []
        if do == "leave":
            self._shelf.leave(name)
            # Who was refused it wants it no more.
            self._on_refused(owner_of(name), "")
            return []
        if do == "drop":
            self._shelf.drop(name)
            return []
        raise ArenaError(f"unknown request {do!r}")

    def _reserve(self, name: str, body_bytes: int, attempt: int) -> None:
        if attempt < self._shelf.attempt:
            raise ArenaError(
                f"attempt {attempt} is over, attempt {self._shelf.attempt} has begun", arena=name
            )
        try:
            self._shelf.reserve(name, body_bytes=body_bytes)
        except ArenaError as error:
            self._on_refused(owner_of(name), str(error))
            raise
        self._on_refused(owner_of(name), "")


class Lease:
    """A trainer's side of an arena that its keeper may lose, because it is restarted.

    Not safe to call from several threads at once.

    Args:
        path: Of the door.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int]] = {}

    def ensure(self, arena_name: str, arena: Arena) -> bool:
        """Hand the arena over if this keeper may not have it; return whether it has it now.

        Costs a look at a file while the keeper stays the same process. Never fails: without a
        keeper the memory lives as long as this process.
        """
        try:
            keeper = self._keeper()
            if self._known.get(arena_name) != keeper:
                adopt(self._path, arena_name, arena)
                self._known[arena_name] = keeper
        except (OSError, ArenaError):
            return False
        return True

    def holds(self, arena_name: str) -> bool:
        """Return whether the keeper is there and was handed the arena; any thread may ask."""
        try:
            return self._known.get(arena_name) == self._keeper()
        except OSError:
            return False

    def _keeper(self) -> tuple[int, int]:
        """Return what tells one keeper from the next: its socket."""
        status = self._path.stat()
        return status.st_ino, status.st_ctime_ns

    def forget(self, arena_name: str) -> None:
        """Hand an arena over no more."""
        self._known.pop(arena_name, None)


def reserve(path: Path, arena_name: str, *, body_bytes: int, attempt: int) -> Arena:
    """Return the arena of that name, from the keeper behind ``path``; it outlives this process.

    Args:
        path: Of the door.
        arena_name: ``"{worker}.{generation}"``; a larger arena is a new generation.
        body_bytes: What a slot has to hold.
        attempt: That it is for; that of an older attempt than the keeper knows of is refused.

    Raises:
        ArenaError: The keeper refuses, or is not there.
    """
    request = {
        "do": "reserve",
        "arena": arena_name,
        "body_bytes": body_bytes,
        "attempt": attempt,
    }
    arena = _arena(_ask(path, request, timeout_s=_RESERVE_S))
    arena.populate()
    return arena


def open_arena(path: Path, arena_name: str) -> Arena:
    """Return an arena of the node, to read from.

    Raises:
        ArenaError: The keeper has none of that name, or is not there.
    """
    return _arena(_ask(path, {"do": "open", "arena": arena_name}))


def adopt(path: Path, arena_name: str, arena: Arena) -> None:
    """Hand an arena to a keeper that does not know it: it was restarted.

    Raises:
        ArenaError: The keeper is not there.
    """
    _ask(path, {"do": "adopt", "arena": arena_name}, fds=[arena.fd])


def leave_arena(path: Path, arena_name: str) -> None:
    """Say that an arena is written no more: the keeper lets go of it once it is not needed.

    Raises:
        ArenaError: The keeper is not there.
    """
    _ask(path, {"do": "leave", "arena": arena_name})


def drop(path: Path, arena_name: str) -> None:
    """Have the keeper let go of an arena.

    Raises:
        ArenaError: The keeper is not there.
    """
    _ask(path, {"do": "drop", "arena": arena_name})


def notify(path: Path, arena_name: str) -> bool:
    """Say that a slot of an arena was finished. Never waits and never fails.

    Returns:
        Whether there is a keeper; one that has not read its notices yet is.
    """
    packet = json.dumps({"do": "finished", "arena": arena_name}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        try:
            sender.sendto(packet, str(_notice_path(path)))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _ask(
    path: Path,
    request: dict[str, Any],
    *,
    fds: Sequence[int] = (),
    timeout_s: float = _ANSWER_S,
) -> list[int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [json.dumps(request).encode()], fds)
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
    try:
        return Arena(fds[0])
    except OSError as error:
        os.close(fds[0])
        raise ArenaError(f"the keeper's memory cannot be mapped: {error}") from error


def _bound(path: Path, kind: socket.SocketKind) -> socket.socket:
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, kind)
    bound.bind(str(path))
    os.chmod(path, 0o600)  # noqa: PTH101  the socket, before anybody can connect
    return bound


def _notice_path(path: Path) -> Path:
    return path.with_name(path.name + _NOTICES)
