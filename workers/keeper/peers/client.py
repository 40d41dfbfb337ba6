"""Read the memory of other nodes' keepers: the client of ``workers.keeper.peers.server``."""

import contextlib
import functools
import socket
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from ucp_core.errors import StorageError
from ucp_core.numerics import crc32
from workers.keeper.peers import server as wire
from workers.keeper.peers.frames import (
    CHALLENGE_BYTES,
    CHUNK,
    SIZE,
    Listing,
    Refused,
    behind,
    family_of,
    fields_of,
    first,
    fit_buffers,
    keep_alive,
    limit_waits,
    listing_of,
    proof,
    receive,
    receive_json,
    receive_views,
    send,
    send_json,
)
from workers.protocol import Held

#: Tries to read a range; each continues where the last one broke off.
_TRIES: Final = 3
#: Maximum number of requests to send ahead: the server reads none while it sends.
_AHEAD_MAX: Final = 64


class _Range(NamedTuple):
    """The fields of a request for bytes."""

    arena: str
    held: Held
    offset_bytes: int
    size_bytes: int
    unchecked: bool


class WireClient:
    """Reads from one peer's keeper. Thread-safe: each thread has its own connection.

    ``num_connections`` counts the connections that all threads have made. With each closed
    connection the peer forgets the messages that it received over it.
    """

    def __init__(self, address: tuple[str, int], *, secret: bytes, tries: int = _TRIES) -> None:
        self.num_connections = 0
        self._tries = tries
        self._address = address
        self._secret = secret
        self._local = threading.local()
        self._lock = threading.Lock()
        #: Weak references, so that the connection of a finished thread closes with it.
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_aborted = False

    def read(
        self,
        arena: str,
        held: Held,
        offset_bytes: int,
        targets: Sequence[memoryview],
        *,
        is_unchecked: bool = False,
    ) -> None:
        """Fill ``targets``, one after the other, from ``offset_bytes`` of the buffer's body.

        After a broken connection, read on over a new one. Chunks carry no crc32 if
        ``is_unchecked``: the caller then verifies the bytes end to end.

        Raises:
            StorageError: The peer refuses (then ``facts["refused"]``), cannot be reached, or sends
                damaged bytes.
        """
        left = [memoryview(target).cast("B") for target in targets if len(target)]
        for number in range(self._tries):
            try:
                for taken in self._stream(
                    arena, held, offset_bytes, left, is_unchecked=is_unchecked
                ):
                    offset_bytes += taken
                    left = behind(left, taken)
            except Refused as refusal:
                if self._asked:
                    self._hang_up()
                raise self._error(held, str(refusal), refused=True) from None
            except OSError as error:
                self._hang_up()
                if number == self._tries - 1 or self._is_aborted:
                    why = f"{type(error).__name__}: {error}"
                    raise self._error(held, why, refused=False) from error
            else:
                return

    def ask(
        self,
        arena: str,
        held: Held,
        ranges: Sequence[tuple[int, int]],
        *,
        is_unchecked: bool = False,
    ) -> None:
        """Request ranges that this thread will read next, in this order.

        The peer then sends one range while this thread works on another. This is only a hint: a
        thread that reads something else gets a new connection, and errors appear when it reads.
        """
        asked = self._asked
        some = [each for each in ranges if each[1]]
        for offset_bytes, size_bytes in some[: max(0, _AHEAD_MAX - len(asked))]:
            wanted = _Range(arena, held, offset_bytes, size_bytes, is_unchecked)
            try:
                self._send(wanted)
            except OSError:
                self._hang_up()
                return
            asked.append(wanted)

    def list_arenas(
        self,
        *,
        after: int,
        timeout_s: float,
        without: Collection[str] = (),
        copied: Mapping[str, Held] = MappingProxyType({}),
    ) -> Listing:
        """Return the versions of the peer's ranks, once its news differ from ``after``.

        Args:
            after: The last listing's ``news``; -1 for an answer at once.
            timeout_s: Must be below 5 s, after which a silent peer counts as gone.
            without: Arenas that will not be copied: their ranks need not wait.
            copied: The newest version of each arena that was copied since the last listing, or need
                not be.

        Raises:
            StorageError: The peer cannot be reached, or sends an invalid answer.
        """
        request = {
            "list": True,
            "after": after,
            "timeout_s": timeout_s,
            "without": sorted(without),
            "copied": _fields_of(copied),
        }
        try:
            connection = self._rested()
            send_json(connection, request)
            answer = receive_json(connection, size_bytes_max=wire.LISTING_BYTES_MAX)
            return listing_of(answer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._hang_up()
            raise self._unreachable(error) from error

    def note_copied(self, copied: Mapping[str, Held]) -> None:
        """Report to the peer that these versions and all older ones are copied, or need not be.

        Even without versions this shows the peer that this thread follows it while others read.
        """
        try:
            send_json(self._rested(), {"copied": _fields_of(copied)})
        except OSError as error:
            self._hang_up()
            raise self._unreachable(error) from error

    def use(self, connection: socket.socket) -> None:
        """Read in this thread over a connection to the peer that was just made."""
        try:
            self._introduce(connection)
        except OSError as error:
            self._hang_up()
            raise self._unreachable(error) from error

    def close(self) -> None:
        """Close this thread's connection."""
        self._hang_up()

    def abort(self) -> None:
        """Interrupt all threads that wait here; every later call fails."""
        with self._lock:
            self._is_aborted = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _stream(
        self,
        arena: str,
        held: Held,
        offset_bytes: int,
        targets: list[memoryview],
        *,
        is_unchecked: bool,
    ) -> Iterator[int]:
        """Receive the chunks, verify them unless unchecked, and yield the size of each."""
        size_bytes = sum(map(len, targets))
        if not size_bytes:
            return
        wanted = _Range(arena, held, offset_bytes, size_bytes, is_unchecked)
        if self._asked and self._asked[0] == wanted:
            self._asked.popleft()
            connection = self._connection()
        else:
            connection = self._rested()
            self._send(wanted)
        done = 0
        while done < size_bytes:
            size, value = CHUNK.unpack(receive(connection, CHUNK.size))
            if size == 0:
                (length,) = SIZE.unpack(receive(connection, SIZE.size))
                raise Refused(receive(connection, min(length, 4096)).decode(errors="replace"))
            if size > min(wire.CHUNK_BYTES, size_bytes - done):
                raise OSError(f"a chunk of {size} bytes was not requested")
            views = list(first(behind(targets, done), size))
            receive_views(connection, views)
            if (
                not is_unchecked
                and functools.reduce(lambda old, view: crc32(view, old), views, 0) != value
            ):
                raise OSError("a chunk was damaged on its way")
            done += size
            yield size

    @property
    def _asked(self) -> deque[_Range]:
        asked: deque[_Range] | None = getattr(self._local, "asked", None)
        if asked is None:
            asked = self._local.asked = deque()
        return asked

    def _send(self, wanted: _Range) -> None:
        request = wanted._asdict() | {"held": fields_of(wanted.held)}
        send_json(self._connection(), request)

    def _rested(self) -> socket.socket:
        """Return a connection without unread answers."""
        if self._asked:
            self._hang_up()
        return self._connection()

    def _connection(self) -> socket.socket:
        held: socket.socket | None = getattr(self._local, "connection", None)
        if held is None:
            held = socket.socket(family_of(self._address[0]), socket.SOCK_STREAM)
            self._introduce(held, self._address)
        return held

    def _introduce(self, held: socket.socket, address: tuple[str, int] | None = None) -> None:
        """Connect, if not done yet, and prove knowledge of the secret."""
        # Register the connection before it connects, so that ``abort`` finds it.
        self._local.connection = held
        with self._lock:
            if self._is_aborted:
                raise ConnectionAbortedError("reading was stopped")
            self._open.add(held)
            self.num_connections += 1
        limit_waits(held, sending_s=wire.STALL_S, receiving_s=wire.STALL_S)
        keep_alive(held)
        if address is not None:
            held.connect(address)
        fit_buffers(held)
        challenge = receive(held, CHALLENGE_BYTES)
        send(held, proof(self._secret, challenge))

    def _hang_up(self) -> None:
        held: socket.socket | None = getattr(self._local, "connection", None)
        self._local.connection = None
        self._asked.clear()
        if held is not None:
            with self._lock:
                self._open.discard(held)
                held.close()

    def _error(self, held: Held, why: str, *, refused: bool) -> StorageError:
        host, port = self._address
        return StorageError(
            f"the snapshot of rank {held.rank} after step {held.step} cannot be had from "
            f"{host}:{port}: {why}; use another source",
            rank=held.rank,
            step=held.step,
            refused=refused,
        )

    def _unreachable(self, error: Exception) -> StorageError:
        host, port = self._address
        return StorageError(
            f"the keeper at {host}:{port} does not answer: {type(error).__name__}: {error}",
            host=host,
            port=port,
            refused=False,
        )


def _fields_of(copied: Mapping[str, Held]) -> dict[str, Sequence[int]]:
    return {name: fields_of(held) for name, held in copied.items()}


@dataclass(frozen=True, slots=True)
class RemotePart:
    """One rank's part of a version in a peer's memory (``workers.memory.versions.Part``).

    Set ``is_unchecked`` if a load verifies all bytes against the part's record.
    """

    client: WireClient
    arena: str
    held: Held
    is_unchecked: bool = False

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Read over the network."""
        self.client.read(
            self.arena, self.held, offset_bytes, targets, is_unchecked=self.is_unchecked
        )

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Request the ranges to fill next: ``(offset_bytes, size_bytes)`` in order."""
        self.client.ask(self.arena, self.held, ranges, is_unchecked=self.is_unchecked)
