"""Get the keeper's memory for a process of the node: the client of the descriptor socket.

The keeper hands out arenas as file descriptors, over a unix socket (``descriptor_socket``). A
connection carries one request: a JSON packet each way, with a descriptor if memory changes hands.
Only processes of the same user on the same machine can connect, and nothing is unpickled.

    {"do": "reserve", "arena": "w0007.0", "body_bytes": 123456, "attempt": 3}  ->  {"ok": {}}  + fd
    {"do": "open", "arena": "w0007.0"}                                         ->  {"ok": {}}  + fd
    {"do": "adopt", "arena": "w0007.0"}  + fd                                  ->  {"ok": {}}
    {"do": "leave", "arena": "replica0/w0007.0"}                               ->  {"ok": {}}
    a request that the keeper cannot serve                  ->  {"refused": "why, what to do"}

A datagram socket beside it receives notices, which get no answer:

    {"do": "finished", "arena": "w0007.0"}

A notice only makes the keeper check the arenas. The socket may drop a notice while others are
unread, because those make the keeper check even later.

``workers.keeper.descriptor_server`` is the server.
"""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from workers.errors import ArenaError
from workers.memory.arena import Arena

#: The name is short, because a socket's path has at most 107 bytes, most of them for the folder.
_SOCKET: Final = "fds"
PACKET_BYTES: Final = 4096
#: Faulting in an arena of 100 GB takes half a minute. A refusal comes at once.
_RESERVE_S: Final = 120.0
#: Time limit in seconds for every other exchange, at either end.
ANSWER_S: Final = 5.0


def descriptor_socket(directory: Path) -> Path:
    """Return the path of the socket of the keeper that works in ``directory``."""
    return directory / _SOCKET


def notice_socket(path: Path) -> Path:
    """Return the path of the socket for notices beside the descriptor socket ``path``."""
    return path.with_name(f"{path.name}.notice")


def reserve(path: Path, arena_name: str, *, body_bytes: int, attempt: int) -> Arena:
    """Reserve an arena at the keeper and return it; it outlives this process.

    Raise ``ArenaError`` if the keeper refuses, or is not running.

    Args:
        arena_name: ``"{worker}.{generation}"``; a larger arena is a new generation.
        body_bytes: Bytes that a buffer must hold.
        attempt: The attempt that uses the arena; the keeper refuses older attempts.
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
    """Return an arena of the node for reading; raise ``ArenaError`` if the keeper has none."""
    return _arena(_ask(path, {"do": "open", "arena": arena_name}))


def adopt(path: Path, arena_name: str, arena: Arena) -> None:
    """Hand an arena to a keeper that was restarted; raise ``ArenaError`` if it is not running."""
    _ask(path, {"do": "adopt", "arena": arena_name}, fds=[arena.fd])


def leave_arena(path: Path, arena_name: str) -> None:
    """Report that an arena is no longer written, so that the keeper may free it.

    Raise ``ArenaError`` if the keeper is not running.
    """
    _ask(path, {"do": "leave", "arena": arena_name})


def notify(path: Path, arena_name: str) -> bool:
    """Notify the keeper of a finished buffer. This never waits or raises an error.

    Return whether a keeper is running, even if its queue of notices is full.
    """
    packet = json.dumps({"do": "finished", "arena": arena_name}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        try:
            sender.sendto(packet, str(notice_socket(path)))
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
    timeout_s: float = ANSWER_S,
) -> list[int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            socket.send_fds(connection, [json.dumps(request).encode()], fds)
            packet, received, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
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
