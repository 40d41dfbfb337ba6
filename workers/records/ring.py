"""The record ring: a process's collectives, readable after it stopped or died.

One file per worker and attempt, mapped into memory: a header, one state per process group, and the
last collectives one by one. The writer makes no system call, so a record survives SIGSTOP and
SIGKILL of the writer and costs about 1 us. These are the communicator and operation records of C4
(arXiv 2406.04594, section 3), kept outside the communication library.

A reader must not take half a store for a whole one. A group's state is therefore kept twice and
written alternately, each copy framed by the number of its store: a writer that is stopped during a
store leaves the other copy intact.

Counterparts: ``workers.collectives.group`` writes, ``workers.records.progress`` reports.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from workers.protocol import GroupState

_MAGIC: Final = b"everring"
_VERSION: Final = 1

#: Groups beyond this many are counted and not recorded. A rank of a 5-axis mesh is in about 10
#: groups, and pipeline pairs add 2 per neighbour.
NUM_GROUPS_MAX: Final = 128
#: Collectives that are kept one by one: some steps' worth in 256 KiB.
NUM_RECORDS: Final = 4096

#: Bits of ``Record.flags``; none while the collective is in flight.
FINISHED: Final = 1
FAILED: Final = 2
ABORTED: Final = 4
_FLAG_BITS: Final = 3

_NO_FILE: Final = (0, 0)

#: The recorded operations; a record holds the index.
OPS: Final = (
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
_OP_CODES: Final = {op: code for code, op in enumerate(OPS)}

# magic, version, attempt, pid, number of ints for ranks
_HEADER = struct.Struct("<8sQQQQ")
_HEADER_BYTES: Final = 128
# Words of the header that change after creation, as indices of 8-byte words.
_NUM_GROUPS_WORD: Final = 8
_LEFT_WORD: Final = 9
_NUM_DROPPED_WORD: Final = 10
# Rank in the attempt + 1.
_RANK_WORD: Final = 11

# store, entered, finished, number and enter_ns of the one waited for or 0, size_bytes, op, store
_STATE = struct.Struct("<QQQQQQQQ")
# length of the name, the name in UTF-8, index of the first rank, number of ranks
_NAME = struct.Struct("<Q112sII")
_GROUP_BYTES: Final = 2 * _STATE.size + _NAME.size
_NAME_BYTES_MAX: Final = 112
# number + 1, group, seq, op and dtype, size_bytes, enter_ns, number + 1, exit_ns with flags
_RECORD = struct.Struct("<QQQQQQQQ")
_EXIT_WORD: Final = 7
_READ_TRIES_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One collective of this process.

    Attributes:
        group: Index of the group in the file's table.
        seq: Number of the collective in its group, from 1.
        dtype: Code of the first tensor's dtype, as given to ``enter``.
        size_bytes: Payload of this rank.
        enter_ns: When it was called, on the machine's monotonic clock; the host calls long before
            a device gets there.
        exit_ns: When its result was seen; 0 while it is in flight.
        flags: ``FINISHED``, ``FAILED`` and ``ABORTED``.
    """

    group: int
    seq: int
    op: str
    dtype: int
    size_bytes: int
    enter_ns: int
    exit_ns: int
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """All that a ring holds, for a look afterwards.

    Attributes:
        rank: The process's in the attempt, -1 if it had none yet.
        groups: State of each group that was called, by ``Record.group``.
        num_dropped: Groups that did not fit, so that nothing of them is in ``records``.
        records: The last collectives, oldest first.
    """

    attempt: int
    rank: int
    groups: Mapping[int, GroupState]
    num_dropped: int
    records: tuple[Record, ...]


class Waited(NamedTuple):
    """A collective that this process waits for.

    Attributes:
        group: Name of the group.
        seq: Number of the collective in it.
    """

    group: str
    ranks: tuple[int, ...]
    seq: int
    op: str


class _GroupWriter:
    """The writer's memory of one group."""

    __slots__ = (
        "called", "entered", "finished", "in_flight", "name", "offset", "on_device", "op", "ranks",
        "size_bytes", "stores", "waited",
    )  # fmt: skip

    def __init__(self, offset: int, name: str, ranks: tuple[int, ...]) -> None:
        self.offset, self.name, self.ranks = offset, name, ranks
        # On a device, those that were called are entered when the device reaches them.
        self.called = self.entered = self.finished = 0
        self.stores = self.size_bytes = self.op = 0
        self.in_flight: deque[_InFlight] = deque()
        # Number and entered_ns of the one that a thread waits for.
        self.waited = (0, 0)
        self.on_device = False

    def now_waited(self) -> tuple[int, int]:
        """Return number and entered_ns of what is waited for; on a device of the first one."""
        if self.on_device and self.in_flight and self.in_flight[0].entered_ns:
            return self.in_flight[0][:2]
        return self.waited


class _InFlight(NamedTuple):
    """A collective that was called and not seen to end; not entered yet if ``entered_ns`` is 0."""

    seq: int
    entered_ns: int
    op: int
    size_bytes: int


class RecordRing:
    """The writing end, thread-safe. One per attempt; replaces what was at ``path`` atomically.

    ``path`` is in memory-backed storage; ``num_ranks`` bounds the room for the groups' members.
    """

    def __init__(self, path: str | os.PathLike[str], *, attempt: int, num_ranks: int) -> None:
        # A rank's groups on a mesh have at most world_size members per axis; pairs have 2.
        self._num_ints = 16 * num_ranks + 2 * NUM_GROUPS_MAX
        self._num_ints_used = 0
        self._records_at = _records_offset(self._num_ints)
        # A new file under the old name: a reader of the last ring keeps what it mapped.
        size_bytes = self._records_at + NUM_RECORDS * _RECORD.size
        draft, self._memory = map_draft(Path(path), size_bytes)
        draft.replace(path)
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, attempt, os.getpid(), self._num_ints)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")
        self._lock = threading.Lock()
        self._groups: list[_GroupWriter] = []
        self._names: dict[str, int] = {}
        self._num_records = 0

    def assign(self, rank: int) -> None:
        """Store this process's rank in the attempt."""
        self._words[_RANK_WORD] = rank + 1

    def group(self, name: str, ranks: tuple[int, ...]) -> int:
        """Add the group ``name`` and return its index; -1 (not recorded) if the table is full.

        A second group of the same name, as from making the same mesh twice, is called ``name#2``.
        """
        with self._lock:
            count = self._names[name] = self._names.get(name, 0) + 1
            unique = name if count == 1 else f"{name}#{count}"
            first = self._num_ints_used
            if len(self._groups) == NUM_GROUPS_MAX or first + len(ranks) > self._num_ints:
                self._words[_NUM_DROPPED_WORD] += 1
                return -1
            index = len(self._groups)
            offset = _HEADER_BYTES + index * _GROUP_BYTES
            encoded = unique.encode()[:_NAME_BYTES_MAX]
            struct.pack_into(f"<{len(ranks)}I", self._memory, _ints_offset(first), *ranks)
            at = offset + 2 * _STATE.size
            _NAME.pack_into(self._memory, at, len(encoded), encoded, first, len(ranks))
            self._num_ints_used += len(ranks)
            self._groups.append(_GroupWriter(offset, unique, ranks))
            # Last: a reader reads no more groups than this.
            self._words[_NUM_GROUPS_WORD] = index + 1
            return index

    def enter(
        self, group: int, op: str, size_bytes: int, dtype: int = 0, *, on_device: bool = False
    ) -> tuple[int, int]:
        """Record a call of a collective; return its number in the group, and its record's.

        One on a device is entered when the device reaches it, see ``reach``: the host is far ahead.
        """
        if group < 0:
            return 0, -1
        code = _OP_CODES[op]
        with self._lock:
            now_ns = time.monotonic_ns()
            state = self._groups[group]
            seq = state.called = state.called + 1
            state.on_device = on_device
            state.in_flight.append(_InFlight(seq, 0 if on_device else now_ns, code, size_bytes))
            if not on_device:
                state.entered, state.op, state.size_bytes = seq, code, size_bytes
            number = self._num_records
            self._num_records = number + 1
            at = self._records_at + number % NUM_RECORDS * _RECORD.size
            word = code | dtype << 32
            _RECORD.pack_into(
                self._memory, at, number + 1, group, seq, word, size_bytes, now_ns, number + 1, 0
            )
            if not on_device:
                self._store(state)
            return seq, number

    def reach(self, group: int, seq: int) -> None:
        """Record that the device has reached ``seq`` of ``group``; earlier ones come first.

        It counts as waited for from now on: nothing shows when a stream waits.
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
            state.entered, state.op, state.size_bytes = seq, reached.op, reached.size_bytes
            self._store(state)

    def wait(self, group: int, seq: int) -> None:
        """Record that a thread waits for the collective ``seq`` of ``group``.

        Not called if the result comes at once. A collective that was started ahead must not make
        its rank look like a waiting one.
        """
        if group < 0:
            return
        with self._lock:
            state = self._groups[group]
            state.waited = next((one[:2] for one in state.in_flight if one.seq == seq), (0, 0))
            self._store(state)

    def leave(self, group: int, seq: int, number: int, flags: int) -> None:
        """Record the end of the collective ``seq`` of ``group``.

        ``FINISHED`` ends the earlier ones of the group, too: this rank has the result of a later
        one, so every member has called the earlier ones.
        """
        if group < 0:
            return
        with self._lock:
            at = (self._records_at + number % NUM_RECORDS * _RECORD.size) // 8
            if self._words[at] == number + 1:
                self._words[at + _EXIT_WORD] = time.monotonic_ns() << _FLAG_BITS | flags
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
        """Return a collective that is waited for since then, or since longer; None without one."""
        with self._lock:
            for state in self._groups:
                seq, entered_ns = state.now_waited()
                if 0 < entered_ns <= since_ns:
                    op = next((one.op for one in state.in_flight if one.seq == seq), 0)
                    return Waited(state.name, state.ranks, seq, OPS[op])
        return None

    def entered(self, name: str) -> int:
        """Return the number of collectives that this process has entered in a group."""
        with self._lock:
            return next((state.called for state in self._groups if state.name == name), 0)

    def num_in_flight(self) -> int:
        """Return how many collectives were called and not seen to end."""
        with self._lock:
            return sum(len(state.in_flight) for state in self._groups)

    def close(self) -> None:
        """Mark the attempt as left: readers see no groups any more. The file stays."""
        with self._lock:
            self._words[_LEFT_WORD] = 1

    def _store(self, state: _GroupWriter) -> None:
        stores = state.stores = state.stores + 1
        _STATE.pack_into(
            self._memory,
            state.offset + stores % 2 * _STATE.size,
            stores,
            state.entered,
            state.finished,
            *state.now_waited(),
            state.size_bytes,
            state.op,
            stores,
        )


class RingView(NamedTuple):
    """What a ring says at one moment.

    Attributes:
        attempt: The attempt that it is of, 0 without a ring.
        groups: The groups in which a collective was called; none once the writer has left.
        num_dropped: Groups that did not fit, of which nothing is recorded.
    """

    attempt: int
    groups: tuple[GroupState, ...]
    num_dropped: int = 0


class RingReader:
    """The reading end, kept open across attempts: mapping a ring costs more than reading it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._file = _NO_FILE
        self._ranks: dict[int, Sequence[int]] = {}

    def look(self, *, now_ns: int | None = None) -> RingView:
        """Return what the ring says now. Works while the writer runs, is stopped, or is gone.

        Args:
            now_ns: Monotonic time that ``waiting_s`` counts to; by default now.
        """
        try:
            found = os.stat(self._path)  # noqa: PTH116  a Path would cost as much again
        except FileNotFoundError:
            return RingView(0, ())
        # No other file has the inode of a mapped one. A ring is complete when it appears, and never
        # shrinks.
        if (found.st_dev, found.st_ino) != self._file:
            if self._memory is not None:
                self._memory.close()
            self._memory, self._file = _map(self._path)
            self._ranks = {}
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return _view_of(self._memory, now_ns, self._ranks)


def is_ring(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a ring that can be read."""
    with _mapped(path) as memory:
        return memory is not None


def read_ring(path: str | os.PathLike[str]) -> Ring:
    """Return what the ring at ``path`` holds, also after its writer left the attempt.

    Waits count to the last record in it: a copy does not say when it was made.
    """
    records = read_records(path)
    with _mapped(path) as memory:
        if memory is None:
            return Ring(attempt=0, rank=-1, groups={}, num_dropped=0, records=())
        now_ns = max((max(one.enter_ns, one.exit_ns) for one in records), default=0)
        states = {
            index: _read_group(memory, index, now_ns, {})
            for index in range(_word(memory, _NUM_GROUPS_WORD))
        }
        return Ring(
            attempt=_HEADER.unpack_from(memory, 0)[2],
            rank=_word(memory, _RANK_WORD) - 1,
            groups={index: state for index, state in states.items() if state is not None},
            num_dropped=_word(memory, _NUM_DROPPED_WORD),
            records=records,
        )


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Return the last collectives, oldest first, without those being stored at this moment."""
    with _mapped(path) as memory:
        if memory is None:
            return ()
        start = _records_offset(_HEADER.unpack_from(memory, 0)[4])
        found: dict[int, Record] = {}
        for at in range(start, start + NUM_RECORDS * _RECORD.size, _RECORD.size):
            number, group, seq, word, size_bytes, enter_ns, commit, end = _RECORD.unpack_from(
                memory, at
            )
            if number == 0 or number != commit:
                continue
            found[number] = Record(
                group=group,
                seq=seq,
                op=OPS[word & 0xFFFFFFFF],
                dtype=word >> 32,
                size_bytes=size_bytes,
                enter_ns=enter_ns,
                exit_ns=end >> _FLAG_BITS,
                flags=end & ((1 << _FLAG_BITS) - 1),
            )
        return tuple(found[number] for number in sorted(found))


def map_draft(path: Path, size_bytes: int) -> tuple[Path, mmap.mmap]:
    """Return a new file that is to replace ``path``, and its memory, all allocated.

    If shared memory is full, the first store to an unallocated page would be a bus error.

    Raises:
        OSError: There is not that much.
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


@contextlib.contextmanager
def _mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap | None]:
    memory, _ = _map(path)
    try:
        yield memory
    finally:
        if memory is not None:
            memory.close()


def _map(path: str | os.PathLike[str]) -> tuple[mmap.mmap | None, tuple[int, int]]:
    """Return the ring at ``path`` and its inode; None and no inode if there is none."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):
        # ValueError: an empty file cannot be mapped.
        return None, _NO_FILE
    if len(memory) > _HEADER_BYTES and _HEADER.unpack_from(memory, 0)[:2] == (_MAGIC, _VERSION):
        return memory, (found.st_dev, found.st_ino)
    memory.close()
    return None, _NO_FILE


def _view_of(memory: mmap.mmap | None, now_ns: int, ranks: dict[int, Sequence[int]]) -> RingView:
    if memory is None:
        return RingView(0, ())
    attempt = _HEADER.unpack_from(memory, 0)[2]
    if _word(memory, _LEFT_WORD):
        return RingView(attempt, ())
    num_groups = _word(memory, _NUM_GROUPS_WORD)
    states = (_read_group(memory, i, now_ns, ranks) for i in range(num_groups))
    groups = tuple(state for state in states if state is not None)
    return RingView(attempt, groups, _word(memory, _NUM_DROPPED_WORD))


def _read_group(
    memory: mmap.mmap, index: int, now_ns: int, ranks: dict[int, Sequence[int]]
) -> GroupState | None:
    offset = _HEADER_BYTES + index * _GROUP_BYTES
    for _ in range(_READ_TRIES_MAX):
        copies = [_STATE.unpack_from(memory, offset + i * _STATE.size) for i in (0, 1)]
        again = [_STATE.unpack_from(memory, offset + i * _STATE.size) for i in (0, 1)]
        # Twice, because the store begins by zeroing the copy from its head on.
        whole = [a for a, b in zip(copies, again, strict=True) if a == b and a[0] == a[7]]
        if whole:
            break
    else:
        return None
    stores, entered, finished, waited, since_ns, size_bytes, op, _ = max(whole)
    if stores == 0:
        return None
    length, name, first, count = _NAME.unpack_from(memory, offset + 2 * _STATE.size)
    if index not in ranks:
        # A group's members never change, and are thousands in a large run.
        ranks[index] = _as_range(struct.unpack_from(f"<{count}I", memory, _ints_offset(first)))
    return GroupState(
        group=name[:length].decode(errors="replace"),
        ranks=ranks[index],
        entered_seq=entered,
        # A rank that waits for a collective uses the earlier ones' results only afterwards.
        finished_seq=max(finished, waited - 1),
        op=OPS[op],
        size_bytes=size_bytes,
        waiting_s=max(1, now_ns - since_ns) / 1e9 if waited else 0.0,
    )


def _as_range(ranks: tuple[int, ...]) -> Sequence[int]:
    """Return ``ranks`` as a range if they are one."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks and step else range(0)
    return found if tuple(found) == ranks else ranks


def _word(memory: mmap.mmap, index: int) -> int:
    return int.from_bytes(memory[8 * index : 8 * index + 8], "little")


def _ints_offset(index: int) -> int:
    return _HEADER_BYTES + NUM_GROUPS_MAX * _GROUP_BYTES + 4 * index


def _records_offset(num_ints: int) -> int:
    end = _ints_offset(num_ints)
    return end + -end % 64
