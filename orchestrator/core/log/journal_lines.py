"""The journal's content: one JSON object for every event and every action of the run.

Pure: ``orchestrator.shell`` writes the lines, one segment per incarnation of the controller. The
journal is the input log: an event's record is written before its actions are performed, and
folding the events again gives the same state and the same actions. The last line of a segment may
be torn, because a controller may die while it appends.

A record: ``{"v": 1, "seq": 91, "at_s": 812.4, "wall_time": 1.7e9, "attempt": 3, "kind":
"WorkerExited", "worker": "w0005", "cause": "crash", "detail": "..."}``. ``attempt`` is the attempt
that the item names, or the current one. Equal orders for consecutive reservations share one record:
``"reservation": 7, "num": 3`` stands for 7, 8 and 9.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.log.codec import encode, known_fields
from orchestrator.core.log.stats import RunStats, placed
from orchestrator.core.machine import step
from orchestrator.core.rules import RunRules
from orchestrator.core.state import RunState
from orchestrator.core.values import kinds
from orchestrator.errors import JournalCorruptError

#: Version of the record format. A reader refuses a higher one.
VERSION = 1

JournalRecord: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The fold of a journal up to one of its records; ``Folded()`` is the fold of no record."""

    state: RunState = field(default_factory=RunState)  #: State of the run since it was last opened.
    stats: RunStats = field(default_factory=RunStats)
    seq: int = -1  #: Number of the record; -1 before the first.
    at_s: float = 0.0
    wall_time: float = 0.0  #: Wall time of the record, seconds since the Unix epoch.

    @classmethod
    def at(cls, last: Mapping[str, Any], state: RunState, stats: RunStats) -> Folded:
        """Return the fold of a journal whose last record is ``last``."""
        places = {name: last[name] for name in ("seq", "at_s", "wall_time")}
        return cls(state=state, stats=stats, **places)


def transition_records(
    event: ev.Event, actions: Iterable[act.Action], *, attempt: int
) -> list[JournalRecord]:
    """Return the records of one event and the actions it led to, in order.

    ``attempt`` is the current one after the event. The writer adds ``seq``, consecutive over the
    whole run, and ``wall_time``.
    """
    head = {"v": VERSION, "at_s": event.at_s, "attempt": attempt}
    return [
        {**head, "kind": type(item).__name__, **encode(item), **({"num": num} if num > 1 else {})}
        for item, num in counted(event, actions)
    ]


def counted(
    event: ev.Event, actions: Iterable[act.Action]
) -> list[tuple[ev.Event | act.Action, int]]:
    """Return the event and its actions, each with its count; equal orders become one item.

    Orders are equal if they differ only in their reservations, which are consecutive.
    """
    found: list[tuple[ev.Event | act.Action, int]] = [(event, 1)]
    for action in actions:
        first, num = found[-1]
        if isinstance(action, _COUNTED) and isinstance(first, _COUNTED):
            goes_on = action.reservation == first.reservation + num
            if goes_on and action == replace(first, reservation=action.reservation):
                found[-1] = (first, num + 1)
                continue
        found.append((action, 1))
    return found


def _actions(record: Mapping[str, Any]) -> Iterator[act.Action]:
    """Yield the actions of a record: several if it stands for consecutive reservations."""
    first = cast("act.Action", parse(record))
    yield first
    for after in range(1, record.get("num", 1)):
        assert isinstance(first, _COUNTED)
        yield replace(first, reservation=first.reservation + after)


def parse(record: Mapping[str, Any]) -> ev.Event | act.Action:
    """Return the event or action of a record.

    Raise ``JournalCorruptError`` if this program does not know the version, or cannot read it.
    """
    where = f"journal record seq={record.get('seq')}"
    version = record.get("v")
    if not isinstance(version, int) or version > VERSION:
        raise JournalCorruptError(
            f"{where} has version {version}, this program reads up to {VERSION}: "
            "use the program that wrote it, or a newer one",
            version=version,
        )
    try:
        kind = _KINDS[record["kind"]]
        if kind is act.StartAttempt:
            record = {**record, "placed": placed(record)}
        # A field with a default may be missing from an older record.
        item: ev.Event | act.Action = kind(**known_fields(kind, record))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise JournalCorruptError(
            f"{where} cannot be read: {type(error).__name__}: {error}", record=dict(record)
        ) from error
    return item


def is_event(record: Mapping[str, Any]) -> bool:
    """Return whether a record holds an event rather than an action."""
    return record.get("kind") in _EVENT_KINDS


def read(
    segments: Sequence[bytes], *, seq: int | None = None, first: int = 1
) -> Iterator[JournalRecord]:
    """Yield the records of all segments, oldest first; skip a torn last line of each.

    ``seq`` is the number of the record before them; None accepts any. ``first`` is the number of
    the first segment, for messages.
        JournalCorruptError: Another line cannot be read, or the numbers are not consecutive.
    """
    for index, segment in enumerate(segments, start=first):
        lines = segment.split(b"\n")
        # A whole line ends with a newline, so what follows the last newline is torn or empty.
        for number, line in enumerate(lines[:-1], start=1):
            where = f"journal segment {index}, line {number}"
            record = _object(line, where)
            if seq is not None and record["seq"] != seq + 1:
                raise JournalCorruptError(
                    f"{where} has seq {record['seq']} and follows {seq}: records are missing or "
                    "doubled",
                    segment=index,
                    line=number,
                )
            seq = record["seq"]
            yield record


def without_late_lines(segments: Sequence[bytes]) -> list[bytes]:
    """Return the segments without what a controller wrote after a later one had taken over.

    The later one numbers its records from the last one that it found. The earlier one may append
    more until it notices the later one, but its decisions after that record do not count.
    ``segments`` are the last ones of the journal, or all, oldest first.
    """
    found = list(segments)
    for begin in range(1, len(found)):
        seq, kind = _head(found[begin])
        for index in reversed(range(begin if kind else 0)):
            kept = _up_to(found[index], seq)
            if kept is found[index] and b"\n" in kept:
                break  # records before it have lower numbers
            found[index] = kept
    return found


def starts(segments: Sequence[bytes]) -> list[int]:
    """Return the indices of the segments that start or resume the run; the first always counts.

    A resumed run has settings of its own, so the segments between two starts are folded separately.
    """
    return [
        index
        for index, segment in enumerate(segments)
        if index == 0 or _head(segment)[1] == ev.RunResumed.__name__
    ]


def fold_on(
    folded: Folded, segments: Sequence[bytes], rules: RunRules, *, first: int = 1
) -> Folded:
    """Return the fold of a journal, given the fold of its first part, whose ``stats`` change.

    ``segments`` are those that follow, oldest first, from number ``first`` on. The rules are those
    of the run since it was last started or resumed.
    """
    begin = max(starts(segments), default=0)
    state, stats, last = RunState() if begin else folded.state, folded.stats, None
    records = read(segments, seq=folded.seq if folded.seq >= 0 else None, first=first)
    # Records before the last start were decided under other rules, so they are only counted.
    num_before = sum(segment.count(b"\n") for segment in segments[:begin])
    for index, last in enumerate(records):
        stats.add(last)
        if index >= num_before and is_event(last):
            state, _ = step(state, _event(last), rules=rules)
    return folded if last is None else Folded.at(last, state, stats)


def verify(segments: Sequence[bytes], rules: RunRules) -> tuple[RunState, JournalRecord | None]:
    """Return the state after one start's events; check that they lead to the journaled actions.

    ``segments`` reach from one start of the run to the next, oldest first. ``rules`` are those of
    that time.

    Raises:
        JournalCorruptError: The actions differ; or as ``read`` and ``parse``.
    """
    state, last, event = RunState(), None, None
    computed: tuple[act.Action, ...] = ()
    journaled: list[ev.Event | act.Action] = []
    for last in read(segments):
        if not is_event(last):
            journaled += _actions(last)
            continue
        # A restart may have cut off actions of the event before it.
        restarted = last["kind"] in (ev.ControllerStarted.__name__, ev.RunResumed.__name__)
        _compare(event, journaled, computed, cut_short=restarted)
        event = last
        state, computed = step(state, _event(last), rules=rules)
        journaled = []
    _compare(event, journaled, computed, cut_short=True)
    return state, last


def _up_to(segment: bytes, seq: int) -> bytes:
    """Return a segment without the records at its end whose number is ``seq`` or higher."""
    end = segment.rfind(b"\n") + 1
    is_late = False
    while end:
        begin = segment.rfind(b"\n", 0, end - 1) + 1
        if _head(segment[begin:end])[0] < seq:
            break
        is_late, end = True, begin
    return segment[:end] if is_late else segment


def _head(lines: bytes) -> tuple[int, str]:
    """Return number and kind of the first record; -1 and "" if ``read`` will refuse it."""
    try:
        record = json.loads(lines[: lines.find(b"\n")])
        return int(record["seq"]), str(record["kind"])
    except (ValueError, KeyError, TypeError):
        return -1, ""


def _compare(
    event: JournalRecord | None,
    journaled: Sequence[ev.Event | act.Action],
    computed: Sequence[act.Action],
    *,
    cut_short: bool,
) -> None:
    expected = computed[: len(journaled)] if cut_short else computed
    if event is None or list(journaled) == list(expected):
        return
    raise JournalCorruptError(
        f"replay differs after {event['kind']} (seq={event['seq']}): the journal says "
        f"{list(journaled)}, the machine says {list(computed)}; another version or other rules "
        "wrote it",
        seq=event["seq"],
    )


def _event(record: JournalRecord) -> ev.Event:
    return cast("ev.Event", parse(record))


def _object(line: bytes, where: str) -> JournalRecord:
    try:
        record = json.loads(line)
        if isinstance(record["seq"], int) and isinstance(record["kind"], str):
            return dict(record)
        problem = "seq or kind has the wrong type"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise JournalCorruptError(
        f"{where} cannot be read ({problem}): it begins {line[:60]!r}; move the segment away to "
        "continue from the ones before it",
        line=where,
    )


#: Orders that share a record if they are equal and consecutive; ``num`` counts them.
_COUNTED = (act.RequestReservation, act.ReleaseReservation)
_EVENT_KINDS = kinds(ev, ev.Event)
_KINDS: dict[str, Any] = {**_EVENT_KINDS, **kinds(act, act.Action)}
