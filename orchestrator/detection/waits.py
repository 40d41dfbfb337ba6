"""The waits of members, from their reports: the wait graph, and calls that differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.diagnosis import (
    Call,
    Kind,
    WaitGraph,
    difference,
    listed,
    outnumbered,
    wait_graph,
)
from workers.protocol import GroupState, WorkerPhase, WorkerReport
from workers.records import OP_CODES, history_after


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Members called different things; no machine is to blame for that."""

    kind: Kind
    ranks: tuple[int, ...]  #: Ranks that differ from more than half of the members.
    evidence: str  #: One line for people.


def graph_of(reports: Mapping[int, WorkerReport | None], *, attempt: int) -> WaitGraph:
    """Return the wait graph of the members, whose reports are given by rank.

    A member without a report or in another attempt has called nothing.
    """
    present = {
        rank: row for rank, row in reports.items() if row is not None and row.attempt == attempt
    }
    graph = wait_graph({rank: row.groups for rank, row in present.items()}, reports)
    # No group exists yet; forming ends when every member has come.
    not_come = frozenset(reports) - frozenset(present)
    forming = {
        rank: not_come
        for rank, row in present.items()
        if row.phase is WorkerPhase.FORMING and rank not in graph.waits_for
    }
    return WaitGraph.of({**graph.waits_for, **forming}) if forming else graph


def waits(row: WorkerReport) -> Iterator[GroupState]:
    """Yield the groups in which the worker waits for a collective."""
    return (group for group in row.groups if group.waiting_s > 0.0)


def disagreement(
    reports: Mapping[int, WorkerReport | None], graph: WaitGraph
) -> Disagreement | None:
    """Return how the members' calls differ; None if they do not.

    In one group, calls of the same number differ, or earlier calls do; or the members wait for each
    other in a circle. The cause is a mistake in the program, or ranks that disagree about data.
    """
    waiting: dict[tuple[str, int], dict[int, GroupState]] = defaultdict(dict)
    for rank, row in sorted(reports.items()):
        for group in waits(row) if row is not None else ():
            if group.entered_seq == group.finished_seq + 1:
                waiting[group.group, group.entered_seq][rank] = group
    for (_, number), calls in waiting.items():
        if found := _other_call(reports, number, calls):
            return found
    for (name, number), calls in waiting.items():
        if found := _other_past(reports, name, number, calls):
            return found
    return _circle(reports, graph, waiting)


def _other_call(
    reports: Mapping[int, WorkerReport | None], number: int, calls: Mapping[int, GroupState]
) -> Disagreement | None:
    """Return the ranks that wait in different calls of the same number; None if none do."""
    # If one of them does not know its type, types are not compared.
    typed = all(one.dtype for one in calls.values())
    by_call: dict[Call, list[int]] = defaultdict(list)
    for rank, one in calls.items():
        call = one.op, one.size_bytes, str(one.dtype) if typed else ""
        alike = (each for each in by_call if not difference(each, call))
        by_call[next(alike, call)].append(rank)
    if len(by_call) < 2:  # noqa: PLR2004  all of them made the same call
        return None
    usual, *others = by_call
    what = difference(usual, others[0])
    told = []
    for (op, size_bytes, _), ranks in by_call.items():
        size = f" of {size_bytes} bytes" if what == "size" else ""
        kind = " of another type" if what == "type" and ranks[0] not in by_call[usual] else ""
        told.append(_at(reports, ranks, f"called {op}{size}{kind}"))
    group = next(iter(calls.values())).group
    return Disagreement(
        Kind.MISMATCH,
        outnumbered(by_call.values()),
        f"{' and '.join(told)} as number {number} of group {group}",
    )


def _other_past(
    reports: Mapping[int, WorkerReport | None],
    name: str,
    number: int,
    calls: Mapping[int, GroupState],
) -> Disagreement | None:
    """Return the ranks whose calls before the one that ``calls`` wait in differ; None if none do.

    The hashes of all calls show this, also for members that went on to another group or to the next
    call of this one.
    """
    first = next(iter(calls.values()))
    past = first.history
    by_past: dict[bool, list[int]] = {True: [], False: []}
    for rank in first.ranks:
        row = reports.get(rank)
        group = next((one for one in row.groups if one.group == name), None) if row else None
        if group is None or not past or not group.history:
            continue
        if group.entered_seq == number:
            by_past[group.history == past].append(rank)
        elif group.entered_seq == number + 1:
            after = history_after(past, OP_CODES[group.op], group.dtype, group.size_bytes)
            by_past[group.history == after].append(rank)
    if not by_past[False]:
        return None
    # The calls that they wait in are alike.
    kind = Kind.DESYNC if {*by_past[True], *by_past[False]} <= calls.keys() else Kind.MISMATCH
    told = " and ".join(map(listed, by_past.values()))
    return Disagreement(
        kind,
        outnumbered(by_past.values()),
        f"{_at(reports, calls, _waits_in(calls))} as number {number} of group {name}; up to it "
        f"{told} made different calls",
    )


def _circle(
    reports: Mapping[int, WorkerReport | None],
    graph: WaitGraph,
    waiting: Mapping[tuple[str, int], Mapping[int, GroupState]],
) -> Disagreement | None:
    """Return the ranks that called groups in another order, so that each waits for another."""
    if len(graph.waits_for) < len(reports) or graph.ends or not any(graph.waits_for.values()):
        return None
    told = [
        f"{_at(reports, calls, _waits_in(calls))} as number {number} of group {name}"
        for (name, number), calls in waiting.items()
    ]
    return Disagreement(
        Kind.DESYNC,
        outnumbered([list(calls) for calls in waiting.values()]),
        f"the members wait for each other in a circle: {'; '.join(told)}",
    )


def _waits_in(calls: Mapping[int, GroupState]) -> str:
    return f"wait{'s' if len(calls) == 1 else ''} in {next(iter(calls.values())).op}"


def _at(reports: Mapping[int, WorkerReport | None], ranks: Iterable[int], does: str) -> str:
    """Describe what ranks do, with their line of the script if they are all at the same one."""
    places = {row.place for rank in ranks if (row := reports[rank]) is not None}
    (place,) = places if len(places) == 1 else ("",)
    return " ".join(filter(None, (listed(ranks), does, place and f"at {place}")))
