"""Read a large range from a peer over several connections, each on another path.

A long copy is cut into pieces, which streams take in turn, so each stream reads as much as its path
carries. ``workers.keeper.peers.paths`` decides their number. The kernel proposes source ports, and
the one with the fastest answer is used.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from itertools import count
from math import inf
from typing import Final

from ucp_core.errors import StorageError
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.frames import family_of, received_bytes, round_trip_s
from workers.keeper.peers.paths import LOOK_S, Action, Paths
from workers.niceness import be_nice
from workers.protocol import Held

NUM_STREAMS: Final = 4
#: A copy that takes less time uses one connection.
_SHORT_S: Final = 0.2
#: Duration of a piece, and its limits in bytes.
_PIECE_S: Final = 0.2
_PIECE_BYTES_MIN: Final = 256 << 10
_PIECE_BYTES_MAX: Final = 16 << 20
_FIRST_BYTES: Final = 4 << 20
#: Number of source ports to try at once. With two paths in each direction, one port in four is idle
#: in both.
_NUM_PORTS: Final = 8
_DIAL_S: Final = 0.5
#: How many connections may break in a row.
_BREAKS_MAX: Final = 3
#: Period of showing the peer, over the first connection, that it is followed.
_KEEP_S: Final = 0.5


def dial(address: tuple[str, int], num_ports: int, within_s: float) -> list[socket.socket]:
    """Return connections to ``address`` from this many source ports, the fastest first.

    Skip connections that are refused or not made in time. The kernel's own time counts.
    """
    pending: dict[int, socket.socket] = {}
    poll = select.poll()
    for _ in range(num_ports):
        each = socket.socket(family_of(address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        each.connect_ex(address)
        pending[each.fileno()] = each
        poll.register(each, select.POLLOUT)
    made: list[socket.socket] = []
    end_s = time.monotonic() + within_s
    while pending and (left_s := end_s - time.monotonic()) > 0:
        for number, _ in poll.poll(1e3 * left_s):
            poll.unregister(number)
            each = pending.pop(number)
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                each.close()
            else:
                made.append(each)
    for each in pending.values():
        each.close()
    return sorted(made, key=round_trip_s)


class Streams:
    """Reads from one peer for one thread; other threads may ``abort``.

    ``client`` reads short ranges, and is the peer's follower.
    """

    def __init__(
        self, client: WireClient, address: tuple[str, int], *, secret: bytes, niceness: int = 0
    ) -> None:
        self._client = client
        self._address = address
        self._secret = secret
        self._niceness = niceness
        self._paths = Paths(NUM_STREAMS)
        self._numbers = count()
        self._streams: dict[int, _Stream] = {}
        self._work = threading.Condition()
        #: Ranges of the current read that no stream has taken, and the number of unfilled ranges.
        self._left: deque[tuple[int, int]] = deque()
        self._num_open = 0
        self._read: tuple[str, Held, memoryview] | None = None
        self._refused: StorageError | None = None
        self._is_aborted = False
        self._rate = 0.0
        #: Connections that broke since the last successful read.
        self._num_broken = 0

    def read(self, arena: str, held: Held, target: memoryview) -> None:
        """Fill ``target`` from the beginning of the buffer's body."""
        first = 0
        if not self._streams or len(target) <= self._rate * _SHORT_S:
            first = min(len(target), max(_FIRST_BYTES, int(self._rate * _SHORT_S)))
            begun_s = time.monotonic()
            self._client.read(arena, held, 0, [target[:first]])
            self._rate = first / max(time.monotonic() - begun_s, 1e-9)
            if first == len(target):
                return
            if len(target) - first <= self._rate * _SHORT_S:
                self._client.read(arena, held, first, [target[first:]])
                self._rate = len(target) / max(time.monotonic() - begun_s, 1e-9)
                return
        self._read_apart(arena, held, target, first)

    def close(self) -> None:
        """Close all connections except the one of ``client``."""
        for number in list(self._streams):
            self._end(number)

    def abort(self) -> None:
        """Interrupt ``read``; every later one fails."""
        with self._work:
            self._is_aborted = True
            self._work.notify_all()
            for each in list(self._streams.values()):
                each.client.abort()

    def _read_apart(self, arena: str, held: Held, target: memoryview, start: int) -> None:
        begun_s = time.monotonic()
        self._paths.begin(begun_s)
        with self._work:
            self._read, self._refused = (arena, held, target), None
            self._left, self._num_open = deque([(start, len(target))]), 1
            self._work.notify_all()
        try:
            self._watch(begun_s)
        finally:
            with self._work:
                is_done, self._read = not self._num_open, None
                self._left.clear()
            if not is_done:
                # The streams would write into memory that the caller reuses.
                self.close()
        if self._refused is not None:
            raise self._refused
        if self._is_aborted:
            raise self._broken("reading was stopped")
        self._rate = (len(target) - start) / (time.monotonic() - begun_s)

    def _watch(self, kept_s: float) -> None:
        """Adapt the streams until everything is read or reading fails."""
        while True:
            with self._work:
                if self._work.wait_for(self._is_over, LOOK_S):
                    return
            now_s = time.monotonic()
            if now_s - kept_s >= _KEEP_S:
                kept_s = now_s
                self._client.note_copied({})
            self._look(now_s)

    def _is_over(self) -> bool:
        return not self._num_open or self._refused is not None or self._is_aborted

    def _look(self, now_s: float) -> None:
        """Act on the decision of ``paths``; without a stream, use the path that answers first."""
        self._end_broken()
        received = {number: each.received() for number, each in self._streams.items()}
        action, number = self._paths.observe(now_s, received)
        if action is Action.LEAVE:
            self._end(number)
        elif action in (Action.LOOK, Action.MOVE) or not self._streams:
            made = dial(self._address, _NUM_PORTS, _DIAL_S)
            if not made:
                raise self._broken("no connection can be made")
            took_s = [*map(round_trip_s, made), *[inf] * (_NUM_PORTS - len(made))]
            is_idle = self._paths.is_idle(now_s, took_s)
            best, *others = made
            if not is_idle and self._streams:
                others.append(best)
            else:
                if action is Action.MOVE:
                    self._end(number)
                self._begin(best)
            for each in others:
                each.close()

    def _end_broken(self) -> None:
        for number, each in list(self._streams.items()):
            if each.is_broken:
                self._end(number)
                self._num_broken += 1
        if self._num_broken >= _BREAKS_MAX:
            raise self._broken("connections break")

    def _begin(self, connection: socket.socket) -> None:
        number = next(self._numbers)
        client = WireClient(self._address, secret=self._secret, tries=1)
        stream = _Stream(self, client, connection, self._niceness)
        self._streams[number] = stream
        self._paths.note_added(time.monotonic(), number)
        stream.start()

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number)
        stream.client.abort()
        with self._work:
            stream.is_broken = True
            self._work.notify_all()
        stream.join()

    def serve(self, stream: _Stream) -> bool:
        """Read the next piece in the thread of a stream; return False if the stream must end."""
        with self._work:
            self._work.wait_for(lambda: self._left or stream.is_broken or self._is_aborted)
            if stream.is_broken or self._is_aborted or self._read is None:
                return False
            size = int(min(max(stream.rate * _PIECE_S, _PIECE_BYTES_MIN), _PIECE_BYTES_MAX))
            low, end = self._left.popleft()
            high = min(low + size, end)
            if high < end:
                self._left.appendleft((high, end))
                self._num_open += 1
            arena, held, target = self._read
        begun_s = time.monotonic()
        try:
            stream.client.read(arena, held, low, [target[low:high]])
        except StorageError as error:
            with self._work:
                if error.facts.get("refused"):
                    self._refused = error
                self._left.appendleft((low, high))
                self._work.notify_all()
            return False
        stream.rate = (high - low) / max(time.monotonic() - begun_s, 1e-9)
        with self._work:
            self._num_broken = 0
            self._num_open -= 1
            self._work.notify_all()
        return True

    def _broken(self, why: str) -> StorageError:
        host, port = self._address
        return StorageError(f"copying from {host}:{port}: {why}", refused=False)


class _Stream(threading.Thread):
    """Reads pieces over one connection."""

    def __init__(
        self, streams: Streams, client: WireClient, connection: socket.socket, niceness: int
    ) -> None:
        super().__init__(name="stream", daemon=True)
        self.client = client
        self.rate = 0.0
        self.is_broken = False
        self._streams = streams
        self._connection = connection
        self._niceness = niceness
        self._received = 0

    def received(self) -> int:
        """Return the bytes received so far."""
        try:
            self._received = received_bytes(self._connection)
        except OSError:
            self.is_broken = True
        return self._received

    def run(self) -> None:
        """Read until the stream is ended, or breaks."""
        be_nice(self._niceness)
        with contextlib.suppress(StorageError):
            self._connection.setblocking(True)
            self.client.use(self._connection)
            while self._streams.serve(self):
                pass
        self.is_broken = True
        self.client.close()
