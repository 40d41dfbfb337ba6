"""Nodes of the spot market that came and went, and what a policy makes of them. Pure.

The files are in ``tests/fixtures/spot``; its ``README.md`` says where they come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

__all__ = ["TRACES", "Change", "Costs", "node_hours", "piece", "replayed", "scaled", "spot_trace"]

_FOLDER = Path(__file__).parents[1] / "fixtures/spot"
#: Nodes that came and went by name, or samples of how many could be had.
TRACES = {
    "p3": "p3-trace.csv",
    "g4dn": "g4dn-trace.csv",
    "v100": "v100x1-east1c.txt",
    "a100": "a100x1-east1b.txt",
}
_HOUR_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class Change:
    """From ``at`` on (hours, or seconds where a function says so) there are ``num_nodes``."""

    at: float
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A policy's costs of changes, in the unit of the replayed trace.

    Attributes:
        loss: From the loss of a node until the rest have made a step again.
        growth: How long all stand still when newcomers enter.
        join: From a node's arrival until its worker may enter.
        interval: Least time between two growths.
    """

    loss: float
    growth: float
    join: float = 0.0
    interval: float = 0.0


def spot_trace(name: str) -> list[Change]:
    """Return the trace of this name, in hours since its beginning."""
    lines = (_FOLDER / TRACES[name]).read_text().splitlines()
    read = _of_names if TRACES[name].endswith(".csv") else _of_samples
    return _merged(read(lines))


def _of_names(lines: Sequence[str]) -> list[Change]:
    """Read ``milliseconds,add|remove,node``."""
    changes: list[Change] = []
    present: set[str] = set()
    for line in lines:
        at_ms, kind, node = line.split(",")
        if kind == "add":
            present.add(node)
        else:
            present.remove(node)
        changes.append(Change(float(at_ms) / _HOUR_MS, len(present)))
    return changes


def _of_samples(lines: Sequence[str]) -> list[Change]:
    """Read ``date, time, nodes``.

    An answer is noted again a minute and two minutes later, also if another came in between: of
    equal ones in a row only the first says when.
    """
    changes: list[Change] = []
    for line in lines:
        day, time, count = line.split(", ")
        if not changes or int(count) != changes[-1].num_nodes:
            at = datetime.fromisoformat(f"{day} {time}").timestamp() / 3600.0
            changes.append(Change(at, int(count)))
    return [Change(change.at - changes[0].at, change.num_nodes) for change in changes]


def _merged(changes: Sequence[Change]) -> list[Change]:
    """Leave out what changes nothing; of several at one time the last counts."""
    last = {change.at: change for change in changes}
    merged: list[Change] = []
    for change in last.values():
        assert not merged or change.at > merged[-1].at, f"not in order at {change}"
        if not merged or change.num_nodes != merged[-1].num_nodes:
            merged.append(change)
    return merged


def scaled(changes: Sequence[Change], num_nodes: int) -> list[Change]:
    """Return the trace as if its largest number of nodes were ``num_nodes``, rounded, at least 1.

    As many of a hundred nodes are lost in an hour as before.
    """
    most = max(change.num_nodes for change in changes)
    return _merged(
        [
            Change(change.at, max(1, round(change.num_nodes * num_nodes / most)))
            for change in changes
        ]
    )


def piece(changes: Sequence[Change], begin: float, end: float) -> list[Change]:
    """Return what happens between two times, as a trace that begins at 0.0."""
    before = [change for change in changes if change.at <= begin][-1:]
    inside = [change for change in changes if begin < change.at < end]
    return [Change(max(change.at - begin, 0.0), change.num_nodes) for change in before + inside]


def node_hours(changes: Sequence[Change], end: float) -> float:
    """Return nodes times hours until ``end``."""
    ends = [change.at for change in changes[1:]] + [end]
    return sum(c.num_nodes * (until - c.at) for c, until in zip(changes, ends, strict=True))


def replayed(changes: Sequence[Change], end: float, costs: Costs) -> float:
    """Return which share of their time the nodes train, if changes cost what ``costs`` says.

    All stand still from a loss on; another loss meanwhile restarts this. Newcomers enter together,
    once one is ready and the last growth is ``costs.interval`` ago. A loss takes a node that
    trains, as long as there is one. No work is lost and no step is slower than it must be.
    """
    assert changes[0].at == 0.0, "a trace begins at 0.0"
    members, coming = changes[0].num_nodes, list[float]()
    trained, now, still_until, grown = 0.0, 0.0, 0.0, -math.inf
    waiting = list(changes[1:])
    while now < end:
        ready = max(min(coming, default=math.inf), still_until, grown + costs.interval)
        change_at = waiting[0].at if waiting else end
        until = min(ready, change_at, end)
        trained += members * max(0.0, until - max(now, still_until))
        now = until
        if now >= end:
            break
        if change_at <= ready:
            change = waiting.pop(0)
            num_lost = members + len(coming) - change.num_nodes
            if num_lost > 0:
                num_members = min(num_lost, members)
                members -= num_members
                coming = sorted(coming)[: change.num_nodes - members]
                still_until = now + costs.loss
            else:
                coming += [now + costs.join] * -num_lost
        else:
            num_entering = sum(at <= now for at in coming)
            members += num_entering
            coming = [at for at in coming if at > now]
            grown = still_until = now + costs.growth
    return trained / node_hours(changes, end)
