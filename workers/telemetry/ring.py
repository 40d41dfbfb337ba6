"""Write the record ring: a process's collectives and own work, readable after it stopped or died.

There is one file per worker and attempt, mapped into memory: a header, one state per process group,
and the last records, of 64 bytes each. The writer makes no system call, so a record survives
SIGSTOP and SIGKILL of the writer. These are the communicator and operation records of C4 (arXiv
2406.04594, section 3), kept outside the communication library.

A record is a collective, or a span of the rank's own work: data, forward, backward, optimizer.
Spans follow each other and do not nest. A span says how long it blocked the training thread, from
the call of a wait to its end: the rest is the rank's own time. Collectives that were started early
overlap with computation, so their times say nothing about that. On a device the host's times are
not the device's, so a forward or backward span also has the device's time, if known.

A reader must not mistake half a store for a whole one. So a group's state is stored in two copies,
written alternately and framed by the number of the store. A writer that is stopped during a store
leaves the other copy intact.

``workers.collectives`` writes the ring, and ``workers.telemetry.ring_reader`` reads it.
"""

import contextlib
import mmap
import os
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from workers.telemetry.ring_format import (
    BLOCKED_HALF,
    DEVICE_WORD,
    EXIT_WORD,
    FINISHED,
    FLAG_BITS,
    GROUP_BYTES,
    HEADER,
    HEADER_BYTES,
    HISTORY_HALF,
    LEFT_WORD,
    MAGIC,
    NAME,
    NAME_BYTES_MAX,
    NO_GROUP,
    NODE_BYTES_MAX,
    NUM_DROPPED_WORD,
    NUM_GROUPS_MAX,
    NUM_GROUPS_WORD,
    NUM_RECORDS,
    NUM_RECORDS_MAX,
    NUM_STORED_WORD,
    OP_CODES,
    OPS,
    PLACE,
    PLACE_AT,
    RANK_WORD,
    RECORD,
    SEQ_HALF,
    SPAN_WORD,
    STATE,
    VERSION,
    call_with_ahead,
    history_after,
    ints_offset,
    last_ring_path,
    packed_call,
    records_offset,
    sent_bytes,
)
from workers.telemetry.ring_reader import records_per_s

#: A ring holds about this many seconds of a run.
_HELD_S: Final = 60.0
_US_MAX: Final = 0xFFFFFFFF


class Waited(NamedTuple):
    """A collective for which this process waits."""

    group: str  #: Name of the group.
    ranks: tuple[int, ...]
    seq: int  #: Number of the collective in it.
    op: str


class _GroupWriter:
    """The state of one group in the writer's memory."""

    __slots__ = (
        "call", "called", "entered", "finished", "history", "in_flight", "name", "offset",
        "on_device", "ranks", "sent_bytes", "size_bytes", "stores", "waited",
    )  # fmt: skip

    def __init__(self, offset: int, name: str, ranks: tuple[int, ...]) -> None:
        self.offset, self.name, self.ranks = offset, name, ranks
        # On a device, called collectives are entered when the device reaches them.
        self.called = self.entered = self.finished = 0
        self.stores = self.size_bytes = self.call = self.history = self.sent_bytes = 0
        self.in_flight: deque[_InFlight] = deque()
        # Number and entered_ns of the collective for which a thread waits.
        self.waited = (0, 0)
        self.on_device = False

    def now_waited(self) -> tuple[int, int]:
        """Return number and entered_ns of the wait; on a device, of the first one in flight."""
        if self.on_device and self.in_flight and self.in_flight[0].entered_ns:
            return self.in_flight[0][:2]
        return self.waited


class _InFlight(NamedTuple):
    """A call whose end was not seen. If ``entered_ns`` is 0, it has not been entered."""

    seq: int
    entered_ns: int
    call: int
    size_bytes: int


class RecordRing:
    """The writing end, thread-safe. The training thread makes one per attempt.

    It replaces the file at ``path`` atomically, and moves the previous ring to ``last_ring_path``.
    Its size holds 60 s of records at the previous ring's rate.

    ``path`` is in memory-backed storage; ``num_ranks`` limits the room for the groups' members.
    """

    def __init__(self, path: str | os.PathLike[str], *, attempt: int, num_ranks: int) -> None:
        # A rank's groups on a mesh have at most world_size members per axis; pairs have 2.
        self._num_ints = 16 * num_ranks + 2 * NUM_GROUPS_MAX
        self._num_ints_used = 0
        self._records_at = records_offset(self._num_ints)
        self._num_records, draft, self._memory = self._allocated(Path(path))
        HEADER.pack_into(
            self._memory, 0, MAGIC, VERSION, attempt, os.getpid(), self._num_ints, self._num_records
        )
        with contextlib.suppress(FileNotFoundError):
            # This links instead of renaming, so that a reader always finds a ring.
            kept = draft.with_suffix(".kept")
            kept.hardlink_to(path)
            kept.replace(last_ring_path(path))
        # This puts a new file under the old name, so a reader of the last ring keeps its mapping.
        draft.replace(path)
        self._view = memoryview(self._memory)
        self._words, self._halves = self._view.cast("Q"), self._view.cast("I")
        self._lock = threading.Lock()
        self._groups: list[_GroupWriter] = []
        self._num_stored = 0
        self._trainer, self._blocked_ns = threading.get_ident(), 0
        self._step = self._micro_batch = 0
        # The newest span: number of its record + 1, and the blocked time before it.
        self._span, self._is_open, self._blocked_before_ns = 0, False, 0

    def _allocated(self, path: Path) -> tuple[int, Path, mmap.mmap]:
        """Return the number of records that fit, the draft of the file, and its memory."""
        needed = int(records_per_s(path) * _HELD_S)
        num_records = min(max(needed, NUM_RECORDS), NUM_RECORDS_MAX)
        if num_records > NUM_RECORDS:
            # Shared memory may be small (64 MiB in a container); fewer records are better than
            # none.
            with contextlib.suppress(OSError):
                size_bytes = self._records_at + num_records * RECORD.size
                return num_records, *map_draft(path, size_bytes)
        return NUM_RECORDS, *map_draft(path, self._records_at + NUM_RECORDS * RECORD.size)

    def assign(self, rank: int, *, on_device: bool = False) -> None:
        """Store this process's rank in the attempt, and whether it computes on a device."""
        self._words[DEVICE_WORD] = on_device
        self._words[RANK_WORD] = rank + 1

    def locate(self, place: tuple[int, int, int], node: str) -> None:
        """Store this process's (dp, pp, tp) in the mesh, and its machine."""
        PLACE.pack_into(self._memory, PLACE_AT, 1, *place, node.encode()[:NODE_BYTES_MAX])

    def group(self, name: str, ranks: tuple[int, ...]) -> int:
        """Add the group ``name`` and return its index; -1 (not recorded) if the table is full."""
        with self._lock:
            first = self._num_ints_used
            if len(self._groups) == NUM_GROUPS_MAX or first + len(ranks) > self._num_ints:
                self._words[NUM_DROPPED_WORD] += 1
                return -1
            index = len(self._groups)
            offset = HEADER_BYTES + index * GROUP_BYTES
            encoded = name.encode()[:NAME_BYTES_MAX]
            struct.pack_into(f"<{len(ranks)}I", self._memory, ints_offset(first), *ranks)
            at = offset + 2 * STATE.size
            NAME.pack_into(self._memory, at, len(encoded), encoded, first, len(ranks))
            self._num_ints_used += len(ranks)
            self._groups.append(_GroupWriter(offset, name, ranks))
            # This comes last, because a reader reads no more groups than this.
            self._words[NUM_GROUPS_WORD] = index + 1
            return index

    def enter(
        self, group: int, op: str, size_bytes: int, dtype: int = 0, *, on_device: bool = False
    ) -> tuple[int, int]:
        """Record a call of a collective; return its number in the group, and its record's number.

        On a device a collective is entered when the device reaches it, as ``reach`` records,
        because the host is far ahead. Until then it is counted as ahead.
        """
        if group < 0:
            return 0, -1
        code = OP_CODES[op]
        with self._lock:
            now_ns = time.monotonic_ns()
            state = self._groups[group]
            seq = state.called = state.called + 1
            history = state.history = history_after(state.history, code, dtype, size_bytes)
            call = packed_call(code, dtype, history)
            state.on_device = on_device
            state.sent_bytes += sent_bytes(op, size_bytes, len(state.ranks))
            state.in_flight.append(_InFlight(seq, 0 if on_device else now_ns, call, size_bytes))
            if not on_device:
                state.entered, state.call, state.size_bytes = seq, call, size_bytes
            number = self._put(group, code, dtype, seq, history, size_bytes, now_ns)
            self._store(state)
            return seq, number

    def span(self, op: str, *, step: int = 0, micro_batch: int = 0, tokens: int = 0) -> int:
        """Record that the last span ends, and that ``op`` of a micro-batch begins unless it is "".

        Call it in the thread that made the ring. Later collectives belong to this step and
        micro-batch. ``tokens`` is the number of tokens that the ending span has read. Return the
        number of the span's record; -1 if none begins.
        """
        with self._lock:
            now_ns = time.monotonic_ns()
            if self._is_open:
                self._is_open = False
                blocked_ns = self._blocked_ns - self._blocked_before_ns
                at = self._end(self._span - 1, FINISHED, now_ns, blocked_ns)
                if tokens and at:
                    self._halves[at // 4 + SEQ_HALF] = min(tokens, _US_MAX)
            if op:
                self._step, self._micro_batch = step, micro_batch
                self._blocked_before_ns = self._blocked_ns
                number = self._put(NO_GROUP, OP_CODES[op], 0, 0, 0, self._span, now_ns)
                self._is_open, self._span = True, number + 1
                # This comes last, because a reader finds the record by it.
                self._words[SPAN_WORD] = number + 1
                return number
            return -1

    def measured(self, number: int, device_s: float) -> None:
        """Record the device time of a finished span."""
        with self._lock:
            at = self._records_at + number % self._num_records * RECORD.size
            if self._words[at // 8] == number + 1:
                us = min(max(1, round(device_s * 1e6)), _US_MAX)
                self._halves[at // 4 + HISTORY_HALF] = us

    def _put(
        self, group: int, op: int, dtype: int, seq: int, history: int, size_bytes: int, now_ns: int
    ) -> int:
        number = self._num_stored
        self._num_stored = number + 1
        at = self._records_at + number % self._num_records * RECORD.size
        RECORD.pack_into(
            self._memory, at, number + 1, group, op, dtype, seq, self._step, self._micro_batch,
            history, 0, size_bytes, now_ns, number + 1, 0,
        )  # fmt: skip
        self._words[NUM_STORED_WORD] = number + 1
        return number

    def _end(self, number: int, flags: int, now_ns: int, blocked_ns: int) -> int:
        """Record the end; return the record's offset, or 0 if it is already overwritten."""
        at = self._records_at + number % self._num_records * RECORD.size
        if self._words[at // 8] != number + 1:
            return 0
        self._halves[at // 4 + BLOCKED_HALF] = min(blocked_ns // 1000, _US_MAX)
        self._words[at // 8 + EXIT_WORD] = now_ns << FLAG_BITS | flags
        return at

    def reach(self, group: int, seq: int) -> None:
        """Record that the device has reached ``seq`` of ``group``; earlier ones come first.

        The process counts as waiting for it from now on, because a stream does not show when it
        waits.
        """
        if group < 0:
            return
        with self._lock:
            state = self._groups[group]
            place = seq - state.in_flight[0].seq if state.in_flight else -1
            if place < 0 or seq <= state.entered:
                return
            reached = state.in_flight[place]._replace(entered_ns=time.monotonic_ns())
            state.in_flight[place] = reached
            state.entered, state.call, state.size_bytes = seq, reached.call, reached.size_bytes
            self._store(state)

    def wait(self, group: int, seq: int) -> None:
        """Record that a thread waits for the collective ``seq`` of ``group``.

        Do not call this if the result comes at once: a rank that started a collective early must
        not look like one that waits.
        """
        if group < 0:
            return
        with self._lock:
            state = self._groups[group]
            state.waited = next((one[:2] for one in state.in_flight if one.seq == seq), (0, 0))
            self._store(state)

    def leave(self, group: int, seq: int, number: int, flags: int, blocked_ns: int = 0) -> None:
        """Record the end of the collective ``seq`` of ``group``.

        ``FINISHED`` also ends the group's earlier ones: this rank has the result of a later one, so
        every member has called the earlier ones. The calling thread was blocked for ``blocked_ns``.
        """
        with self._lock:
            if blocked_ns and threading.get_ident() == self._trainer:
                self._blocked_ns += blocked_ns
            if group < 0:
                return
            self._end(number, flags, time.monotonic_ns(), blocked_ns)
            state = self._groups[group]
            if flags & FINISHED and seq > state.finished:
                state.finished = seq
                state.entered = max(seq, state.entered)
                while state.in_flight and state.in_flight[0].seq <= seq:
                    state.in_flight.popleft()
                if state.waited[0] <= seq:
                    state.waited = (0, 0)
                self._store(state)

    def waited(self, since_ns: int) -> Waited | None:
        """Return a collective for which a thread has waited since then, if there is one."""
        with self._lock:
            for state in self._groups:
                seq, entered_ns = state.now_waited()
                if 0 < entered_ns <= since_ns:
                    call = next((one.call for one in state.in_flight if one.seq == seq), 0)
                    return Waited(state.name, state.ranks, seq, OPS[call & 0xFF])
        return None

    def entered(self, name: str) -> int:
        """Return the number of collectives that this process has entered in a group."""
        with self._lock:
            return next((state.called for state in self._groups if state.name == name), 0)

    def num_in_flight(self) -> int:
        """Return the number of collectives that were called and whose end was not seen."""
        with self._lock:
            return sum(len(state.in_flight) for state in self._groups)

    def close(self) -> None:
        """Mark the attempt as left: readers no longer see its groups. The file stays."""
        with self._lock:
            self._words[LEFT_WORD] = 1

    def _store(self, state: _GroupWriter) -> None:
        stores = state.stores = state.stores + 1
        STATE.pack_into(
            self._memory,
            state.offset + stores % 2 * STATE.size,
            stores,
            state.entered,
            state.finished,
            *state.now_waited(),
            state.size_bytes,
            call_with_ahead(state.call, state.called - state.entered),
            state.sent_bytes,
            stores,
        )


def map_draft(path: Path, size_bytes: int) -> tuple[Path, mmap.mmap]:
    """Return a new file to replace ``path``, and its memory, fully allocated.

    Raise OSError if there is not enough memory. Otherwise the first store to an unallocated page
    would be a bus error.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            draft.unlink()
            what = f"{error.strerror} for {size_bytes} bytes"
            raise OSError(error.errno, what, str(path)) from error
        return draft, mmap.mmap(file.fileno(), size_bytes)
