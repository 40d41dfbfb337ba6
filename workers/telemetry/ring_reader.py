"""Read record rings from another process, or after the writer has ended."""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from workers.protocol import NUM_COSTS_MAX, Digest, GroupState
from workers.telemetry.costs import Costs, Span
from workers.telemetry.ring_format import (
    DEVICE_WORD,
    FLAG_BITS,
    GROUP_BYTES,
    HEADER,
    HEADER_BYTES,
    LEFT_WORD,
    MAGIC,
    NAME,
    NO_GROUP,
    NUM_DROPPED_WORD,
    NUM_GROUPS_WORD,
    NUM_STORED_WORD,
    OPS,
    PLACE,
    PLACE_AT,
    RANK_WORD,
    RECORD,
    SPAN_WORD,
    STATE,
    VERSION,
    ints_offset,
    records_offset,
    unpacked_call,
)

_NO_FILE: Final = (0, 0)
_READ_TRIES_MAX: Final = 100

#: The name and the members of a group.
_Named: TypeAlias = tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One collective of this process, or one span of its own work."""

    group: int  #: Index of the group in the file's table; -1 for a span.
    seq: int  #: Number of the collective in its group, from 1.
    op: str
    dtype: int  #: Code of the first tensor's dtype, as given to ``enter``.
    step: int  #: The step under way, 0 before the first span.
    micro_batch: int  #: Number of the micro-batch among this rank's of the step, from 0.
    history: int  #: Hash of the group's calls up to this one.
    #: Time that this rank waited: for the collective, or for any collective during the span.
    blocked_s: float
    device_s: float  #: Device time of a span; 0.0 if unknown.
    size_bytes: int  #: Payload of this rank.
    #: Time of the call on the machine's monotonic clock. The host calls long before a device
    #: reaches the collective.
    enter_ns: int
    exit_ns: int  #: Time at which the result was seen; 0 while it is in flight.
    flags: int  #: ``FINISHED``, ``FAILED`` and ``ABORTED``.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The whole content of a ring, for later analysis."""

    attempt: int
    rank: int  #: The process's rank in the attempt, -1 if it had none yet.
    place: tuple[int, int, int] | None  #: The process's (dp, pp, tp) in the mesh; None if unknown.
    node: str  #: The process's machine; "" if unknown.
    #: Whether the process computes on a device, about which the host's times say nothing.
    on_device: bool
    groups: Mapping[int, GroupState]  #: State of each group that was called, by ``Record.group``.
    #: Number of groups that did not fit, so ``records`` does not have their calls.
    num_dropped: int
    records: tuple[Record, ...]  #: The last collectives, oldest first.


class RingView(NamedTuple):
    """The content of a ring at one moment."""

    attempt: int  #: The ring's attempt, 0 without a ring.
    #: The groups in which a collective was called; none once the writer has left.
    groups: tuple[GroupState, ...]
    num_dropped: int = 0  #: Number of groups that did not fit and are not recorded.


class RingReader:
    """The reading end.

    It stays open across attempts, because mapping a ring costs more than reading it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._file = _NO_FILE
        self._names: dict[int, _Named] = {}
        self._costs, self._last_span = Costs(), 0

    def look(self, *, now_ns: int | None = None) -> RingView:
        """Return the current content of the ring, whether the writer runs, is stopped, or is gone.

        ``now_ns`` is the monotonic time up to which ``waiting_s`` counts; by default now.
        """
        try:
            found = os.stat(self._path)  # noqa: PTH116  a Path would cost as much again
        except FileNotFoundError:
            return RingView(0, ())
        # Another file cannot have the inode of a mapped one. A ring is complete when it appears,
        # and never shrinks.
        if (found.st_dev, found.st_ino) != self._file:
            if self._memory is not None:
                self._memory.close()
            self._memory, self._file = _map(self._path)
            self._names, self._costs, self._last_span = {}, Costs(), 0
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return _view_of(self._memory, now_ns, self._names)

    def digest(self, *, now_ns: int) -> Digest | None:
        """Return the rank's own work since the last digest, from the ring of the last look.

        Return None if it has no span, or its writer has left. Spans of a device get their times
        when the step ends; until then they wait for the next digest.
        """
        memory = self._memory
        if memory is None or _word(memory, LEFT_WORD) or not (newest := _word(memory, SPAN_WORD)):
            return None
        *_, num_ints, num_records = HEADER.unpack_from(memory, 0)
        start = records_offset(num_ints)
        on_device = bool(_word(memory, DEVICE_WORD))
        found: list[Span] = []
        now_in, since_ns, at, has_gap = 0, now_ns, newest, False
        while at > self._last_span:
            number, _, op, _, tokens, step, micro_batch, took, us, before, enter_ns, commit, end = (
                RECORD.unpack_from(memory, start + (at - 1) % num_records * RECORD.size)
            )
            if number != at or commit != at:
                has_gap = True
                break
            if end and on_device and not found and OPS[op] != "optimizer":
                newest = before
            elif end:
                own_s = ((end >> FLAG_BITS) - enter_ns) / 1e9 - us / 1e6
                if on_device and OPS[op] != "data":
                    own_s = took / 1e6
                found.append(Span(OPS[op], step, micro_batch, own_s, tokens))
            else:
                # Only the newest span may be open; it is read again when it has ended.
                now_in, since_ns, newest = op, enter_ns, before
            at = before
        self._last_span = newest
        costs = self._costs.add(found[::-1], has_gap=has_gap, on_device=on_device)
        return Digest(
            costs=costs[-NUM_COSTS_MAX:],
            span=OPS[now_in],
            span_s=max(0, now_ns - since_ns) / 1e9,
        )


def is_ring(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a ring that can be read."""
    with _mapped(path) as memory:
        return memory is not None


def read_ring(path: str | os.PathLike[str]) -> Ring:
    """Return the content of the ring at ``path``, even after its writer left the attempt.

    Waits count up to the last record, because a copy does not show when it was made.
    """
    records = read_records(path)
    with _mapped(path) as memory:
        if memory is None:
            return Ring(
                attempt=0, rank=-1, place=None, node="", on_device=False, groups={}, num_dropped=0,
                records=(),
            )  # fmt: skip
        now_ns = max((max(one.enter_ns, one.exit_ns) for one in records), default=0)
        states = {
            index: _read_group(memory, index, now_ns, {})
            for index in range(_word(memory, NUM_GROUPS_WORD))
        }
        is_known, dp, pp, tp, node = PLACE.unpack_from(memory, PLACE_AT)
        return Ring(
            place=(dp, pp, tp) if is_known else None,
            node=node.rstrip(b"\0").decode(errors="replace"),
            on_device=bool(_word(memory, DEVICE_WORD)),
            attempt=HEADER.unpack_from(memory, 0)[2],
            rank=_word(memory, RANK_WORD) - 1,
            groups={index: state for index, state in states.items() if state is not None},
            num_dropped=_word(memory, NUM_DROPPED_WORD),
            records=records,
        )


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Return the last collectives, oldest first, without those that are being stored right now."""
    with _mapped(path) as memory:
        if memory is None:
            return ()
        found: dict[int, Record] = {}
        *_, num_ints, num_records = HEADER.unpack_from(memory, 0)
        start = records_offset(num_ints)
        for at in range(start, start + num_records * RECORD.size, RECORD.size):
            number, group, op, dtype, seq, step, micro, history, us, size, enter_ns, commit, end = (
                RECORD.unpack_from(memory, at)
            )
            if number == 0 or number != commit:
                continue
            found[number] = Record(
                group=-1 if group == NO_GROUP else group,
                seq=0 if group == NO_GROUP else seq,
                op=OPS[op],
                dtype=dtype,
                step=step,
                micro_batch=micro,
                history=0 if group == NO_GROUP else history,
                blocked_s=us / 1e6,
                device_s=history / 1e6 if group == NO_GROUP else 0.0,
                size_bytes=0 if group == NO_GROUP else size,
                enter_ns=enter_ns,
                exit_ns=end >> FLAG_BITS,
                flags=end & ((1 << FLAG_BITS) - 1),
            )
        return tuple(found[number] for number in sorted(found))


def records_per_s(path: str | os.PathLike[str]) -> float:
    """Return the rate of records per second in the ring at ``path``; 0.0 without two of them."""
    with _mapped(path) as memory:
        if memory is None:
            return 0.0
        *_, num_ints, num_records = HEADER.unpack_from(memory, 0)
        stored = _word(memory, NUM_STORED_WORD)
        kept = min(stored, num_records)
        start = records_offset(num_ints)

        def entered_ns(number: int) -> int:
            at = start + number % num_records * RECORD.size
            return int(RECORD.unpack_from(memory, at)[10])

        if kept <= 1:
            return 0.0
        held_ns = entered_ns(stored - 1) - entered_ns(stored - kept)
        return float(kept * 1e9 / max(1, held_ns))


@contextlib.contextmanager
def _mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap | None]:
    memory, _ = _map(path)
    try:
        yield memory
    finally:
        if memory is not None:
            memory.close()


def _map(path: str | os.PathLike[str]) -> tuple[mmap.mmap | None, tuple[int, int]]:
    """Return the ring at ``path`` and its inode; None and no inode without one."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):
        # ValueError: an empty file cannot be mapped.
        return None, _NO_FILE
    if len(memory) > HEADER_BYTES and HEADER.unpack_from(memory, 0)[:2] == (MAGIC, VERSION):
        return memory, (found.st_dev, found.st_ino)
    memory.close()
    return None, _NO_FILE


def _view_of(memory: mmap.mmap | None, now_ns: int, names: dict[int, _Named]) -> RingView:
    if memory is None:
        return RingView(0, ())
    attempt = HEADER.unpack_from(memory, 0)[2]
    if _word(memory, LEFT_WORD):
        return RingView(attempt, ())
    num_groups = _word(memory, NUM_GROUPS_WORD)
    states = (_read_group(memory, i, now_ns, names) for i in range(num_groups))
    groups = tuple(state for state in states if state is not None)
    return RingView(attempt, groups, _word(memory, NUM_DROPPED_WORD))


def _read_group(
    memory: mmap.mmap, index: int, now_ns: int, names: dict[int, _Named]
) -> GroupState | None:
    offset = HEADER_BYTES + index * GROUP_BYTES
    for _ in range(_READ_TRIES_MAX):
        copies = [STATE.unpack_from(memory, offset + i * STATE.size) for i in (0, 1)]
        again = [STATE.unpack_from(memory, offset + i * STATE.size) for i in (0, 1)]
        # The copies are read twice, because a store first zeroes a copy from its head on.
        whole = [a for a, b in zip(copies, again, strict=True) if a == b and a[0] == a[8]]
        if whole:
            break
    else:
        return None
    stores, entered, finished, waited, since_ns, size_bytes, call, sent_bytes, _ = max(whole)
    if stores == 0:
        return None
    op, dtype, history, num_ahead = unpacked_call(call)
    if index not in names:
        # Members are read only once: they never change, and a large run has thousands.
        names[index] = _read_name(memory, offset + 2 * STATE.size)
    name, ranks = names[index]
    return GroupState(
        group=name,
        ranks=ranks,
        entered_seq=entered,
        # A rank that waits for a collective uses the earlier ones' results only afterwards.
        finished_seq=max(finished, waited - 1),
        op=OPS[op],
        size_bytes=size_bytes,
        waiting_s=max(1, now_ns - since_ns) / 1e9 if waited else 0.0,
        dtype=dtype,
        history=history,
        sent_bytes=sent_bytes,
        num_ahead=num_ahead,
    )


def _read_name(memory: mmap.mmap, offset: int) -> _Named:
    length, name, first, count = NAME.unpack_from(memory, offset)
    ranks = _as_range(struct.unpack_from(f"<{count}I", memory, ints_offset(first)))
    return _shared(name[:length].decode(errors="replace"), ranks)


@lru_cache(maxsize=64)
def _shared(name: str, ranks: Sequence[int]) -> _Named:
    """Return one object for all workers of a node: a report pickles an object once."""
    return name, ranks


def _as_range(ranks: tuple[int, ...]) -> Sequence[int]:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks and step else range(0)
    return found if tuple(found) == ranks else ranks


def _word(memory: mmap.mmap, index: int) -> int:
    return int.from_bytes(memory[8 * index : 8 * index + 8], "little")
