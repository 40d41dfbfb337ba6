"""The wire format between keepers, for both ends: proof, requests, listings, bytes.

Nothing is unpickled, and every received length is bounded.
"""

import fcntl
import hmac
import json
import operator
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from workers.protocol import Held

CHALLENGE_BYTES: Final = 32
#: Length of a JSON text or of a refusal.
SIZE: Final = struct.Struct("<I")
#: Size and crc32 of a chunk.
CHUNK: Final = struct.Struct("<II")
#: The kernel takes up to 1024 buffers in one call.
_VIEWS_MAX: Final = 512
#: The kernel moves this much of a file at a time, and waits for a slow peer each time. While that
#: takes less than ``_FILE_S``, it may move more in one call.
_FILE_BYTES: Final = 64 << 10
_FILE_S: Final = 0.05
#: Pause before the next ``accept`` when the process cannot open another file.
_ACCEPT_S: Final = 0.1
_HELD: Final = tuple(field.name for field in fields(Held))
_values_of: Final = operator.attrgetter(*_HELD)
_SILENT: Final = "the peer sends nothing"
_CLOSED: Final = "the peer closed the connection"
#: Idle seconds, seconds between probes, number of probes: after that a machine counts as gone.
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
#: Between near machines small buffers still carry 2 GB/s, and the bytes on their way stay in the
#: second-level caches: over loopback, 12 MB cost 3.2 ms of processor time instead of 4.6.
_NEAR_S: Final = 100e-6
_NEAR_BYTES: Final = ((socket.SO_SNDBUF, 128 << 10), (socket.SO_RCVBUF, 512 << 10))
#: Fields of a struct tcp_info: the round trip in microseconds, and the bytes received.
_ROUND_TRIP: Final = struct.Struct("68xI")
_RECEIVED: Final = struct.Struct("128xQ")
#: A struct timeval.
_TIME: Final = struct.Struct("@ll")


def proof(secret: bytes, challenge: bytes) -> bytes:
    """Return the answer to a challenge that only a peer with the secret can give."""
    return hmac.digest(secret, challenge, "sha256")


def send_json(connection: socket.socket, value: Any) -> None:
    """Send a JSON text after its length."""
    packet = json.dumps(value).encode()
    send(connection, SIZE.pack(len(packet)) + packet)


def receive_json(connection: socket.socket, *, size_bytes_max: int) -> Any:
    """Receive a JSON text from ``send_json``."""
    (size_bytes,) = SIZE.unpack(receive(connection, SIZE.size))
    if size_bytes > size_bytes_max:
        raise ValueError(f"{size_bytes} bytes of JSON, but at most {size_bytes_max} are accepted")
    return json.loads(receive(connection, size_bytes))


def receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Receive exactly ``size_bytes``."""
    data = b""
    while len(data) < size_bytes:
        try:
            more = connection.recv(size_bytes - len(data), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(_SILENT) from error
        if not more:
            raise ConnectionError(_CLOSED)
        data += more
    return data


def receive_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill ``views``, one after the other."""
    left = [view for view in views if len(view)]
    while left:
        try:
            count, *_ = connection.recvmsg_into(left[:_VIEWS_MAX], 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(_SILENT) from error
        if not count:
            raise ConnectionError(_CLOSED)
        left = behind(left, count)


def send(
    connection: socket.socket,
    data: bytes | memoryview,
    flags: int = 0,
    *,
    stall_s: float = 0.0,
    moved: Callable[[], object] = lambda: None,
) -> None:
    """Send all of ``data`` over a connection with ``limit_waits``.

    The peer may stall for ``stall_s``, if that is longer than the limit. ``moved`` is called
    whenever bytes were sent.
    """
    left = memoryview(data)
    _send_all(len(left), lambda done: connection.send(left[done:], flags), stall_s, moved)


def send_file(
    connection: socket.socket,
    file: int,
    offset_bytes: int,
    size_bytes: int,
    *,
    stall_s: float,
    moved: Callable[[], object],
) -> None:
    """Send bytes of a file as ``send`` does.

    The kernel sends the file's pages without a copy, so the bytes may change until the peer has
    them.
    """
    step_bytes = _FILE_BYTES

    def send_some(done: int) -> int:
        nonlocal step_bytes
        count, begun_s = min(size_bytes - done, step_bytes), time.monotonic()
        num_sent = os.sendfile(connection.fileno(), file, offset_bytes + done, count)
        is_fast = time.monotonic() - begun_s < _FILE_S
        step_bytes = 4 * step_bytes if is_fast else _FILE_BYTES
        return num_sent

    _send_all(size_bytes, send_some, stall_s, moved)


def _send_all(
    size_bytes: int, send_some: Callable[[int], int], stall_s: float, moved: Callable[[], object]
) -> None:
    done = 0
    moved_s = time.monotonic()
    while done < size_bytes:
        try:
            done += send_some(done)
        except BlockingIOError as error:
            if time.monotonic() - moved_s >= stall_s:
                raise TimeoutError("the peer takes nothing") from error
            continue
        moved_s = time.monotonic()
        moved()


def limit_waits(
    connection: socket.socket, *, sending_s: float | None, receiving_s: float | None
) -> None:
    """Make the kernel give up on a silent peer; None waits forever.

    ``settimeout`` would poll before each call and move one buffer at a time, at half the speed.
    """
    connection.settimeout(None)
    for option, stall_s in ((socket.SO_RCVTIMEO, receiving_s), (socket.SO_SNDTIMEO, sending_s)):
        whole_s, part_s = divmod(stall_s or 0.0, 1.0)
        packed = _TIME.pack(int(whole_s), int(part_s * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, packed)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an IP address; a machine may have only version 6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel notice a machine that is gone, and send small packets at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def round_trip_s(connection: socket.socket) -> float:
    """Return the kernel's estimate of the round trip to the peer, at first the handshake's."""
    said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    (round_trip_us,) = _ROUND_TRIP.unpack(said)
    return float(round_trip_us) * 1e-6


def received_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the kernel has received over a connection, read or not."""
    said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    return int(_RECEIVED.unpack(said)[0])


def fit_buffers(connection: socket.socket) -> None:
    """Use small buffers for a near peer; the kernel chooses those for a far one."""
    if round_trip_s(connection) <= _NEAR_S:
        for option, size_bytes in _NEAR_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, option, size_bytes)


def accepted(listener: socket.socket, is_closed: Callable[[], bool]) -> Iterator[socket.socket]:
    """Yield each connection to ``listener`` until that is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if is_closed():
                return
            # Out of descriptors or memory: try again later.
            time.sleep(_ACCEPT_S)
        else:
            yield connection


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the other end closed the connection, or it broke."""
    poll = select.poll()
    # The kernel always reports complete hang-ups and errors.
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def num_queued(connection: socket.socket) -> int:
    """Return the number of bytes sent that the peer's kernel has not acknowledged."""
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def fields_of(held: Held) -> Sequence[int]:
    """Return the fields of ``held`` in order."""
    values: Sequence[int] = _values_of(held)
    return values


def held_of(values: Sequence[Any]) -> Held:
    """Return the version in a JSON array of its fields."""
    return Held(**dict(zip(_HELD, map(int, values), strict=True)))


@dataclass(frozen=True, slots=True)
class Listed:
    """An arena of a peer."""

    body_bytes: int  #: Size of a buffer in bytes.
    parts: tuple[Held, ...]  #: The arena's complete versions, oldest first.
    #: Attempt and step of the version that all ranks and their peers have; None if there is none.
    kept: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions that a peer's own ranks have written."""

    news: int  #: The value to pass as ``after`` in the next request.
    arenas: Mapping[str, Listed]  #: Arenas by name.

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that ``listing_of`` reads."""
        return {
            "news": self.news,
            "arenas": {
                name: {
                    "body_bytes": arena.body_bytes,
                    "parts": list(map(fields_of, arena.parts)),
                    "kept": arena.kept,
                }
                for name, arena in self.arenas.items()
            },
        }


def listing_of(answer: Any) -> Listing:
    """Return the listing in a JSON object."""
    return Listing(
        news=int(answer["news"]),
        arenas={
            name: Listed(
                body_bytes=int(listed["body_bytes"]),
                parts=tuple(held_of(part) for part in listed["parts"]),
                kept=_version_of(listed["kept"]),
            )
            for name, listed in answer["arenas"].items()
        },
    )


def _version_of(answer: Any) -> tuple[int, int] | None:
    if answer is None:
        return None
    attempt, step = map(int, answer)
    return attempt, step


def behind(views: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Return ``views`` without their first ``size_bytes``."""
    left: list[memoryview] = []
    for view in views:
        taken = min(size_bytes, len(view))
        size_bytes -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left


def first(views: Sequence[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """Yield the first ``size_bytes`` of ``views``."""
    for view in views:
        if not size_bytes:
            return
        part = view[:size_bytes]
        size_bytes -= len(part)
        yield part


class Refused(Exception):  # noqa: N818  an answer, not a failure
    """The other side refuses, with a reason."""


class RateLimit:
    """A token bucket of one second's bytes; 0 is unlimited. A thread that overdraws it sleeps."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait until this many bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - 1.0) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)
