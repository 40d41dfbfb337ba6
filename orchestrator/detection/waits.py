"""The wait graph over all process groups, and its sinks.

A collective ends when every member of its group has called it. So a rank that waits in a
collective waits for the members that have not called it, and those may wait, in another group,
for others still. At the end of the chain is who holds everybody up. C4 (arXiv 2406.04594,
section 3) looks at one communicator at a time and suspects the ranks that lag behind in it; on
a mesh of groups that blames ranks that wait themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workers.protocol import GroupState, WorkerPhase, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """Members of an attempt by rank.

    Attributes:
        waits_for: For each rank that waits: the ranks that have not called its collective.
            Empty if all of them have, so that it waits for the network.
        sinks: Ranks that somebody waits for, directly or not, and that do not wait themselves.
    """

    waits_for: Mapping[int, frozenset[int]]
    sinks: frozenset[int]


def wait_graph(reports: Mapping[int, WorkerReport | None], *, attempt: int) -> WaitGraph:
    """Return the graph for the members ``reports``, by rank in the attempt.

    A member without a report, or in another attempt, has called nothing.
    """
    present = {
        rank: row for rank, row in reports.items() if row is not None and row.attempt == attempt
    }
    called: dict[str, dict[int, int]] = {}
    for rank, row in present.items():
        for group in row.groups:
            called.setdefault(group.group, {})[rank] = group.entered_seq
    # All that wait for the same collective wait for the same ranks. To look for them anew for each
    # would cost the square of a group's size.
    missing: dict[tuple[str, int], frozenset[int]] = {}

    def missing_in(group: GroupState) -> frozenset[int]:
        collective = (group.group, group.finished_seq)
        if collective not in missing:
            entered = called[group.group]
            missing[collective] = frozenset(
                member
                for member in group.ranks
                if member in reports and entered.get(member, 0) <= group.finished_seq
            )
        return missing[collective]

    not_come = frozenset(reports) - frozenset(present)
    waits_for: dict[int, frozenset[int]] = {}
    for rank, row in present.items():
        waiting = [missing_in(group) for group in waits(row)]
        if waiting:
            waits_for[rank] = waiting[0].union(*waiting[1:])
        elif row.phase is WorkerPhase.FORMING:
            # No group exists yet; forming ends when every member has come.
            waits_for[rank] = not_come
    wanted = frozenset().union(*{id(each): each for each in waits_for.values()}.values())
    return WaitGraph(waits_for=waits_for, sinks=wanted - frozenset(waits_for))


def waits(row: WorkerReport) -> Iterator[GroupState]:
    """Return the groups in which the worker waits for a collective."""
    return (group for group in row.groups if group.waiting_s > 0.0)


def mismatch(reports: Mapping[int, WorkerReport | None]) -> str | None:
    """Return how members of one group wait in different operations of the same number, if so.

    That is a mistake in the program, or ranks that disagree about data; nobody is to blame for
    it as a machine. Each rank's line of the script is named, if it is known.
    """
    seen: dict[tuple[str, int], tuple[int, str, str]] = {}
    for rank, row in sorted(reports.items()):
        for group in waits(row) if row is not None else ():
            if group.entered_seq != group.finished_seq + 1:
                continue
            at = f" at {row.place}" if row is not None and row.place else ""
            key = (group.group, group.entered_seq)
            first, op, first_at = seen.setdefault(key, (rank, group.op, at))
            if op != group.op:
                return (
                    f"rank {first} called {op}{first_at} and rank {rank} called {group.op}{at} "
                    f"as number {group.entered_seq} of group {group.group}"
                )
    return None
