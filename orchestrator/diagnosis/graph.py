"""The wait graph over all process groups, and its sinks.

A collective ends when every member of its group has called it. So a rank that waits in a collective
waits for the members that have not called it, and those may in turn wait for others in another
group. The rank at the end of the chain delays all others. C4 (arXiv 2406.04594, section 3) examines
one communicator at a time and suspects the ranks that lag behind in it; on a mesh of groups that
blames ranks that wait themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from workers.protocol import GroupState


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Which ranks wait for which."""

    #: For each rank that waits, the ranks that have not called its collective. Empty if all have
    #: called it: the rank then waits for a link or a device.
    waits_for: Mapping[int, frozenset[int]]
    wanted: frozenset[int]  #: Ranks that others wait for.

    @classmethod
    def of(cls, waits_for: Mapping[int, frozenset[int]]) -> WaitGraph:
        """Return the graph of these waits."""
        # Most of the sets are the same object.
        return cls(
            waits_for, frozenset().union(*{id(each): each for each in waits_for.values()}.values())
        )

    @property
    def sinks(self) -> frozenset[int]:
        """Return the ranks that others wait for, directly or not, and that wait for none."""
        return self.wanted - frozenset(self.waits_for)

    @property
    def ends(self) -> frozenset[int]:
        """Return the ranks that others wait for and that wait only in what all have called."""
        return frozenset(
            rank for rank in self.wanted if rank in self.waits_for and not self.waits_for[rank]
        )


def wait_graph(groups: Mapping[int, Sequence[GroupState]], ranks: Collection[int]) -> WaitGraph:
    """Return the graph of the ranks, given the states of their ``groups``.

    A rank without groups has called nothing. Members that are not in ``ranks`` are ignored.
    """
    called: dict[str, dict[int, int]] = {}
    for rank, states in groups.items():
        for group in states:
            called.setdefault(group.group, {})[rank] = group.entered_seq
    # All ranks in the same collective wait for the same ranks. Searching for these once per rank
    # would take quadratic time in the size of a group.
    missing: dict[tuple[str, int], frozenset[int]] = {}

    def missing_in(group: GroupState) -> frozenset[int]:
        collective = (group.group, group.finished_seq)
        if collective not in missing:
            entered = called[group.group]
            missing[collective] = frozenset(
                member
                for member in group.ranks
                if member in ranks and entered.get(member, 0) <= group.finished_seq
            )
        return missing[collective]

    waits_for: dict[int, frozenset[int]] = {}
    for rank, states in groups.items():
        waiting = [missing_in(group) for group in states if group.waiting_s > 0.0]
        if waiting:
            waits_for[rank] = waiting[0].union(*waiting[1:])
    return WaitGraph.of(waits_for)
