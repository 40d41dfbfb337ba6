"""Serve byte ranges of buffers to other nodes over TCP: the keepers' data plane.

A client proves that it knows the keeper's secret, then sends one request after the other. Every
chunk carries its crc32, and the server checks the buffer before each chunk. It refuses a version
that was overwritten in the meantime and never sends it. A client that verifies all bytes against
the version's own record may request unchecked chunks, which carry no crc32. The kernel sends these
as the arena's pages and copies nothing: over loopback a load gets 3.5 GB/s instead of 2.6. Bytes
just read for a crc32 are copied out of the cache. If they were sent as pages, mirrors would get 1.5
GB/s instead of 1.9, because the receiver would read them from memory.

    server  32 random bytes
    client  HMAC-SHA256 of them under the secret, 32 bytes
    client  length (u32) and JSON, one of

      {"arena", "held": [field, ...], "offset_bytes", "size_bytes", "unchecked": bool}
    server  chunks: size (u32), crc32 (u32), the bytes; or size 0, length (u32) and the refusal

      {"copied": {arena: held}}
    server  nothing

      {"take": n}
    client  n bytes, which the server drops: the client times how they arrive

      {"list": true, "after": n, "timeout_s": t, "without": [arena, ...], "copied": {arena: held}}
    server  once what it lists has changed since news n, or after t: length (u32) and JSON
            {"news": n, "arenas": {name: {"body_bytes": ..., "parts": [held, ...],
                                       "kept": [attempt, step] or null}}}

A listing holds versions of the node's own ranks, no copies. A peer that lists is a follower. While
it continues to list, the ranks of the listed arenas take their next snapshot only when it has
copied the last one, except for arenas in ``without`` and arenas whose newest version is in
``copied``.
"""

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Final

from ucp_core.numerics import crc32
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers.frames import (
    CHALLENGE_BYTES,
    CHUNK,
    SIZE,
    Listed,
    Listing,
    RateLimit,
    Refused,
    accepted,
    family_of,
    fit_buffers,
    has_hung_up,
    held_of,
    keep_alive,
    limit_waits,
    proof,
    receive,
    receive_json,
    send,
    send_file,
    send_json,
)
from workers.memory import NUM_BUFFERS, Arena, is_copy
from workers.niceness import be_nice
from workers.protocol import Held

#: A chunk of 1 MiB would still be cached for its checksum, but wakes both ends more often: it costs
#: a tenth more processor time, a third more for unchecked bytes.
CHUNK_BYTES: Final = 4 << 20
#: Under a rate limit all connections together send one chunk in this time, of at least the size
#: below: ranks stop waiting for a peer after 2 s, and a receiver gives up after 5 s.
_CHUNK_S: Final = 0.05
_CHUNK_BYTES_MIN: Final = 4 << 10
_REQUEST_BYTES_MAX: Final = 64 << 10
#: Room for three versions of some thousands of arenas.
LISTING_BYTES_MAX: Final = 1 << 20
_DROP_BYTES: Final = 256 << 10
#: A peer that neither sends nor receives for this long is dropped.
STALL_S: Final = 5.0
#: A peer that receives some bytes within this time counts as present for the ranks.
_SIGN_S: Final = 1.0
#: A peer that lists may pause this long between two requests, because ranks wait for it.
_FOLLOW_STALL_S: Final = 2.0
#: Period of checks whether the peer is still there while there is no news.
_LOOK_S: Final = 0.25
_POLL_S_MAX: Final = 2.0
#: News of one rank waits this long for the other ranks of its node. They finish within 1 ms of each
#: other, and a listing costs 0.3 ms of processor time.
_TOGETHER_S: Final = 0.003

#: Shortest period of reports to ranks that peers are still there.
_RENEW_S: Final = 0.2


class WireServer:
    """Serves the arenas in ``table`` on one interface until ``close``.

    Args:
        host: Address on the data network, not 0.0.0.0.
        bytes_per_s: Limit over all connections; 0 for none.
    """

    def __init__(
        self,
        table: ArenaTable,
        *,
        host: str,
        secret: bytes,
        bytes_per_s: float = 0.0,
        niceness: int = 0,
    ) -> None:
        self._table = table
        self._niceness = niceness
        self._secret = secret
        self._limit = RateLimit(bytes_per_s)
        self._bytes_per_s = bytes_per_s
        self._liveness = PeerLiveness(table)
        self._closed = False
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        #: The last listing, by connection.
        self._listed: dict[socket.socket, dict[str, list[Held]]] = {}
        self._thread = threading.Thread(target=self._accept, name="wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; transfers break off."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.disconnect()

    def disconnect(self) -> None:
        """Break all connections; peers connect again."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        for connection in accepted(self._listener, lambda: self._closed):
            self._open.add(connection)
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="wire-peer", daemon=True
                ).start()
            except RuntimeError:
                # Out of threads: the peer tries again, or reads from another node.
                self._open.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        be_nice(self._niceness)
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                keep_alive(connection)
                fit_buffers(connection)
                follows: bool | None = None
                limit_waits(connection, sending_s=_SIGN_S, receiving_s=STALL_S)
                challenge = os.urandom(CHALLENGE_BYTES)
                send(connection, challenge)
                if not hmac.compare_digest(
                    receive(connection, CHALLENGE_BYTES), proof(self._secret, challenge)
                ):
                    return
                while True:
                    if follows != self._liveness.follows(connection):
                        follows = self._liveness.follows(connection)
                        # Other clients are idle between two loads, and close the connection
                        # themselves.
                        receiving_s = _FOLLOW_STALL_S if follows else None
                        limit_waits(connection, sending_s=_SIGN_S, receiving_s=receiving_s)
                    request = receive_json(connection, size_bytes_max=_REQUEST_BYTES_MAX)
                    self._answer(connection, request)
        finally:
            self._liveness.follow(connection, ())
            self._listed.pop(connection, None)
            self._open.discard(connection)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        for name, held in dict(request.get("copied", {})).items():
            self._liveness.note_got(connection, str(name), held_of(held))
        if "list" in request:
            self._list(connection, request)
        elif "take" in request:
            _drop(connection, min(int(request["take"]), CHUNK_BYTES))
        elif "arena" in request:
            self._send_range(connection, request)

    def _list(self, connection: socket.socket, request: dict[str, Any]) -> None:
        after, without = int(request["after"]), set(map(str, request["without"]))
        end_s = time.monotonic() + min(float(request["timeout_s"]), _POLL_S_MAX)
        news, versions = after, self._originals()
        while True:
            self._liveness.follow(connection, versions.keys() - without)
            wait_s = min(_LOOK_S, max(end_s - time.monotonic(), 0.0))
            news = self._table.wait_news(news, wait_s)
            versions = self._originals()
            # Copies made here are also news, but not for the peer.
            if news != after and (after < 0 or versions != self._listed.get(connection)):
                if after < 0 or _agree(versions):
                    break
                # The other ranks are about to finish the same step: list them together.
                end_s = min(end_s, time.monotonic() + _TOGETHER_S)
            if time.monotonic() >= end_s:
                break
            if has_hung_up(connection):
                raise ConnectionError("the peer hung up")
        self._liveness.follow(connection, versions.keys() - without)
        arenas = {
            name: Listed(arena.body_bytes, tuple(parts), arena.kept())
            for name, parts in versions.items()
            if (arena := self._table.arena(name)) is not None
        }
        self._listed[connection] = versions
        send_json(connection, Listing(news, arenas).to_json())

    def _originals(self) -> dict[str, list[Held]]:
        arenas = self._table.arenas()
        return {name: arena.versions() for name, arena in arenas.items() if not is_copy(name)}

    def _send_range(self, connection: socket.socket, request: dict[str, Any]) -> None:
        name, held = str(request["arena"]), held_of(request["held"])
        start, size_bytes = int(request["offset_bytes"]), int(request["size_bytes"])
        is_unchecked = bool(request.get("unchecked"))
        try:
            arena = self._arena(name, held, start, start + size_bytes)
            chunk_bytes = self._chunk_bytes()
            with arena.opened() as file:
                for low in range(start, start + size_bytes, chunk_bytes):
                    high = min(low + chunk_bytes, start + size_bytes)
                    self._send_chunk(
                        connection, arena, held, low, high, file if is_unchecked else None
                    )
        except Refused as refusal:
            words = str(refusal).encode()
            self._send(connection, CHUNK.pack(0, 0) + SIZE.pack(len(words)) + words)

    def _chunk_bytes(self) -> int:
        """Return the chunk size for the current number of connections."""
        if not self._bytes_per_s:
            return CHUNK_BYTES
        shared_bytes = self._bytes_per_s * _CHUNK_S / max(len(self._open), 1)
        return min(CHUNK_BYTES, max(int(shared_bytes), _CHUNK_BYTES_MIN))

    def _arena(self, name: str, held: Held, start: int, stop: int) -> Arena:
        arena = self._table.find(name)
        if arena is None:
            raise Refused(f"no snapshot of {name} is held here")
        if not (0 <= held.buffer < NUM_BUFFERS and 0 <= start <= stop <= arena.body_bytes):
            raise Refused(f"a buffer of {name} has {arena.body_bytes} bytes, of {NUM_BUFFERS}")
        return arena

    def _send_chunk(
        self,
        connection: socket.socket,
        arena: Arena,
        held: Held,
        low: int,
        high: int,
        file: int | None,
    ) -> None:
        """Send bytes of a buffer's body: unchecked from ``file``, otherwise from the cache."""
        self._limit.wait(high - low)
        data = arena.body(held.buffer)[low:high]
        value = crc32(data) if file is None else 0
        if arena.held(held.buffer) != held:
            raise Refused(f"the snapshot after step {held.step} was overwritten")
        # The header goes in one packet with the data.
        self._send(connection, CHUNK.pack(len(data), value), socket.MSG_MORE)
        if file is None:
            self._send(connection, data)
        else:
            place = arena.body_offset(held.buffer) + low
            moved = self._liveness.renew
            send_file(connection, file, place, len(data), stall_s=STALL_S, moved=moved)

    def _send(self, connection: socket.socket, data: bytes | memoryview, flags: int = 0) -> None:
        send(connection, data, flags, stall_s=STALL_S, moved=self._liveness.renew)


class PeerLiveness:
    """Reports to ranks which arenas peers follow, and the versions that all followers have.

    Thread-safe. A rank waits for its followers before its next snapshot.
    """

    def __init__(self, table: ArenaTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        #: Versions that each follower reported to have, by arena.
        self._got: dict[Hashable, dict[str, Held | None]] = {}
        self._renewed_s = 0.0

    def follows(self, follower: Hashable) -> bool:
        """Return whether the follower follows anything."""
        return follower in self._got

    def follow(self, follower: Hashable, names: Collection[str]) -> None:
        """Set the arenas of a follower; () once it is gone."""
        if self._got.get(follower, {}).keys() == set(names):
            self.renew()
            return
        with self._lock:
            before = self._got.pop(follower, {})
            if names:
                self._got[follower] = {name: before.get(name) for name in names}
            for name in before.keys() | set(names):
                self._tell(name)

    def renew(self) -> None:
        """Note that the followers are still there; called at every sign of one."""
        now_s = time.monotonic()
        if not self._got or now_s - self._renewed_s < _RENEW_S:
            return
        with self._lock:
            self._renewed_s = now_s
            for name in {name for names in self._got.values() for name in names}:
                self._tell(name)

    def note_got(self, follower: Hashable, name: str, held: Held) -> None:
        """Note the versions that a follower has, or need not have.

        A follower with a new connection may report them before it lists, and follows from then on.
        """
        with self._lock:
            self._got.setdefault(follower, {})[name] = held
            self._tell(name)

    def _tell(self, name: str) -> None:
        arena = self._table.arena(name)
        if arena is None:
            return
        got = [names[name] for names in self._got.values() if name in names]
        # The arena may be freed in the meantime.
        with contextlib.suppress(ValueError):
            arena.set_followed(bool(got))
            newest = arena.newest()
            if newest is not None and got and all(each == newest for each in got):
                arena.note_copied(newest)


def _drop(connection: socket.socket, size_bytes: int) -> None:
    target = memoryview(bytearray(min(size_bytes, _DROP_BYTES)))
    while size_bytes:
        num = connection.recv_into(target[: min(size_bytes, _DROP_BYTES)])
        if not num:
            raise ConnectionError("the peer hung up")
        size_bytes -= num


def _agree(versions: Mapping[str, Sequence[Held]]) -> bool:
    """Return whether the newest versions of all ranks are from one step."""
    return len({(held[-1].attempt, held[-1].step) for held in versions.values() if held}) <= 1
