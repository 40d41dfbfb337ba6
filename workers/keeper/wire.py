"""The keepers' data plane: byte ranges of slots over TCP, from one node's memory to another's.

A connection proves that it knows the run's secret and then asks for ranges, one after the other.
Every chunk carries its crc32, and the server looks at the slot again before each: what was
written over meanwhile is refused and never sent as if it were the version that was asked for.

    server  32 random bytes
    client  HMAC-SHA256 of them under the secret, 32 bytes
    client  length (u32) and JSON: {"worker", "held": {...}, "offset_bytes", "size_bytes"}
    server  chunks: size (u32), crc32 (u32), the bytes; or size 0, length (u32) and the refusal
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from ucp_core.checksums import crc32
from ucp_core.errors import StorageError
from workers.keeper.arena import Arena
from workers.keeper.door import Shelf
from workers.protocol import Held

__all__ = ["CHUNK_BYTES", "RemotePart", "WireClient", "WireServer"]

#: Fits the second-level cache several times over; a call per chunk costs nothing beside it.
CHUNK_BYTES: Final = 4 << 20
_CHALLENGE_BYTES: Final = 32
_REQUEST_BYTES_MAX: Final = 4096
_SIZE: Final = struct.Struct("<I")
_CHUNK: Final = struct.Struct("<II")
#: A peer that neither sends nor takes for so long is given up; the caller has other sources.
_STALL_S: Final = 5.0
#: How often a range is asked for again, from where it broke off.
_TRIES: Final = 3


class _Refused(Exception):  # noqa: N818  an answer, not a failure
    """The other side says why not."""


class WireServer:
    """Serves the slots of ``shelf`` on one interface until ``close``.

    Args:
        shelf: What there is.
        host: Address of the interface to listen on: the data network's, not any.
        secret: Of the run.
        bytes_per_s: Most that goes out, over all connections; 0 is no limit.
    """

    def __init__(self, shelf: Shelf, *, host: str, secret: bytes, bytes_per_s: float = 0.0) -> None:
        self._shelf = shelf
        self._secret = secret
        self._limit = _Limit(bytes_per_s)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more; what is under way breaks off."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="wire-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(_STALL_S)
                challenge = os.urandom(_CHALLENGE_BYTES)
                connection.sendall(challenge)
                if not hmac.compare_digest(
                    _receive(connection, _CHALLENGE_BYTES), _proof(self._secret, challenge)
                ):
                    return
                # Idle between two loads; the peer closes.
                connection.settimeout(None)
                while True:
                    self._answer(connection, _request(connection))
        finally:
            self._open.discard(connection)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        worker, held = str(request["worker"]), Held(**request["held"])
        offset_bytes, size_bytes = int(request["offset_bytes"]), int(request["size_bytes"])
        connection.settimeout(_STALL_S)
        try:
            arena = self._arena(worker, offset_bytes, offset_bytes + size_bytes)
            for low in range(offset_bytes, offset_bytes + size_bytes, CHUNK_BYTES):
                high = min(low + CHUNK_BYTES, offset_bytes + size_bytes)
                self._send_chunk(connection, arena, held, low, high)
        except _Refused as refusal:
            words = str(refusal).encode()
            connection.sendall(_CHUNK.pack(0, 0) + _SIZE.pack(len(words)) + words)
        connection.settimeout(None)

    def _arena(self, worker: str, start: int, stop: int) -> Arena:
        arena = self._shelf.arena(worker)
        if arena is None:
            raise _Refused(f"no snapshot of {worker} is held here")
        if not 0 <= start <= stop <= arena.body_bytes:
            raise _Refused(f"a slot of {worker} has {arena.body_bytes} bytes")
        return arena

    def _send_chunk(
        self, connection: socket.socket, arena: Arena, held: Held, low: int, high: int
    ) -> None:
        self._limit.wait(high - low)
        data = arena.body(held.slot)[low:high]
        value = crc32(data)
        if arena.held(held.slot) != held:
            raise _Refused(f"the snapshot after step {held.step} was overwritten")
        connection.sendall(_CHUNK.pack(high - low, value))
        connection.sendall(data)


class WireClient:
    """Reads ranges from one peer's keeper; safe to call from several threads, one at a time each.

    Args:
        address: Where the peer's ``WireServer`` listens.
        secret: Of the run.
    """

    def __init__(self, address: tuple[str, int], *, secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._local = threading.local()

    def read(
        self, worker: str, held: Held, offset_bytes: int, targets: Sequence[memoryview]
    ) -> None:
        """Fill ``targets``, one after the other, from ``offset_bytes`` of the slot's body on.

        A connection that breaks is made anew, and the range goes on where it broke off.

        Raises:
            StorageError: The peer refuses, cannot be reached, or sends damaged bytes.
        """
        left = [memoryview(target).cast("B") for target in targets if len(target)]
        for number in range(_TRIES):
            try:
                for taken in self._stream(worker, held, offset_bytes, left):
                    offset_bytes += taken
                    left = _behind(left, taken)
            except _Refused as refusal:
                raise self._error(held, str(refusal)) from None
            except OSError as error:
                self._hang_up()
                if number == _TRIES - 1:
                    raise self._error(held, f"{type(error).__name__}: {error}") from error
            else:
                return

    def _stream(
        self, worker: str, held: Held, offset_bytes: int, targets: list[memoryview]
    ) -> Iterator[int]:
        """Receive chunk by chunk; yield the size of each that is in place and verified."""
        size_bytes = sum(map(len, targets))
        if not size_bytes:
            return
        connection = self._connection()
        request = {
            "worker": worker,
            "held": asdict(held),
            "offset_bytes": offset_bytes,
            "size_bytes": size_bytes,
        }
        packet = json.dumps(request).encode()
        connection.sendall(_SIZE.pack(len(packet)) + packet)
        done = 0
        while done < size_bytes:
            size, value = _CHUNK.unpack(_receive(connection, _CHUNK.size))
            if size == 0:
                (length,) = _SIZE.unpack(_receive(connection, _SIZE.size))
                raise _Refused(_receive(connection, min(length, 4096)).decode(errors="replace"))
            if size > min(CHUNK_BYTES, size_bytes - done):
                raise OSError(f"a chunk of {size} bytes was not asked for")
            found = 0
            for view in _first(_behind(targets, done), size):
                _receive_into(connection, view)
                found = crc32(view, found)
            if found != value:
                raise OSError("a chunk was damaged on its way")
            done += size
            yield size

    def _connection(self) -> socket.socket:
        held: socket.socket | None = getattr(self._local, "connection", None)
        if held is None:
            held = socket.create_connection(self._address, timeout=_STALL_S)
            # Known before the first exchange: whoever fails there hangs up.
            self._local.connection = held
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = _receive(held, _CHALLENGE_BYTES)
            held.sendall(_proof(self._secret, challenge))
        return held

    def _hang_up(self) -> None:
        held: socket.socket | None = getattr(self._local, "connection", None)
        self._local.connection = None
        if held is not None:
            held.close()

    def close(self) -> None:
        """Close this thread's connection."""
        self._hang_up()

    def _error(self, held: Held, why: str) -> StorageError:
        host, port = self._address
        return StorageError(
            f"the snapshot of rank {held.rank} after step {held.step} cannot be had from "
            f"{host}:{port}: {why}; use another source",
            rank=held.rank,
            step=held.step,
        )


class RemotePart:
    """One rank's part of a version in a peer's memory; see ``workers.snapshot.tier.Part``."""

    def __init__(self, client: WireClient, worker: str, held: Held) -> None:
        self._client = client
        self._worker = worker
        self._held = held

    @property
    def held(self) -> Held:
        """Return what the slot said when the part was found."""
        return self._held

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        """Read over the network."""
        self._client.read(self._worker, self._held, offset_bytes, targets)


class _Limit:
    """A token bucket of one second's worth; a debt is slept off by whoever made it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, num_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - 1.0) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


def _proof(secret: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, challenge, "sha256")


def _request(connection: socket.socket) -> dict[str, Any]:
    (length,) = _SIZE.unpack(_receive(connection, _SIZE.size))
    if length > _REQUEST_BYTES_MAX:
        raise ValueError(f"a request of {length} bytes")
    request: dict[str, Any] = json.loads(_receive(connection, length))
    return request


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]


def _behind(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of ``views`` behind their first ``num_bytes``."""
    left: list[memoryview] = []
    for view in views:
        cut = min(num_bytes, len(view))
        num_bytes -= cut
        if cut < len(view):
            left.append(view[cut:])
    return left


def _first(views: Sequence[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield the first ``num_bytes`` of ``views``."""
    for view in views:
        if not num_bytes:
            return
        part = view[:num_bytes]
        num_bytes -= len(part)
        yield part
