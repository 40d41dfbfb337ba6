"""The waits of members, from their reports: the graph, and calls that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from orchestrator.diagnosis import Kind, WaitGraph, difference, wait_graph
from workers.protocol import GroupState, WorkerPhase, WorkerReport

_TYPE: Final = " of another type"


def graph_of(reports: Mapping[int, WorkerReport | None], *, attempt: int) -> WaitGraph:
    """Return the graph for the members ``reports``, by rank in the attempt.

    A member without a report, or in another attempt, has called nothing.
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
    """Return the groups in which the worker waits for a collective."""
    return (group for group in row.groups if group.waiting_s > 0.0)


def mismatch(reports: Mapping[int, WorkerReport | None]) -> tuple[Kind, str] | None:
    """Return how members of one group wait in different calls of the same number, if so.

    Or that their calls before it differed, where those of that number do not. That is a mistake in
    the program, or ranks that disagree about data; nobody is to blame for it as a machine. Each
    rank's line of the script is named, if it is known.
    """
    shifted: tuple[Kind, str] | None = None
    seen: dict[tuple[str, int], tuple[int, GroupState, str]] = {}
    for rank, row in sorted(reports.items()):
        for group in waits(row) if row is not None else ():
            if group.entered_seq != group.finished_seq + 1:
                continue
            at = f" at {row.place}" if row is not None and row.place else ""
            key = (group.group, group.entered_seq)
            first, usual, first_at = seen.setdefault(key, (rank, group, at))
            what = difference(_call(usual, group), _call(group, usual))
            if what:
                sizes = (f" of {one.size_bytes} bytes" for one in (usual, group))
                mine, its = sizes if what == "size" else ("", _TYPE if what == "type" else "")
                return Kind.MISMATCH, (
                    f"rank {first} called {usual.op}{mine}{first_at} and rank {rank} called "
                    f"{group.op}{its}{at} as number {group.entered_seq} of group {group.group}"
                )
            if usual.history and group.history and usual.history != group.history:
                told = (
                    f"rank {first}{first_at} and rank {rank}{at} wait in number "
                    f"{group.entered_seq} of group {group.group}, and differ in a call before it"
                )
                shifted = shifted or (Kind.DESYNC, told)
    return shifted


def _call(one: GroupState, other: GroupState) -> tuple[str, int, str]:
    """Return a call as it is compared with another; a type counts if both are known."""
    is_known = one.dtype and other.dtype
    return one.op, one.size_bytes, str(one.dtype) if is_known else ""
