"""Find slow links, senders and receivers in the matrix of transfers.

The cost of a transfer counts from when both ends have called it, so that no rank is blamed for a
late peer. One slow place of the matrix is a link, a slow row a sender, a slow column a receiver
(C4, arXiv 2406.04594, section 3). If a link is the only place in its row or column, all of these
remain possible.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from statistics import median
from typing import Final, TypeAlias

from orchestrator.diagnosis.records import Operation
from orchestrator.diagnosis.slow import Lag, growth, lags
from orchestrator.diagnosis.verdicts import Alternative, Guilty, Verdict
from orchestrator.fault_kinds import FaultKind

_PAIR: Final = 2
#: Share of a step below which transfers of a link do not matter.
_SHARE: Final = 0.02
#: Smallest factor that counts: a network is never as even as computing.
_TIMES: Final = 1.3

_Link: TypeAlias = tuple[int, int]


def slow_transfers(rows: Mapping[int, list[Operation]]) -> list[Verdict]:
    """Return the verdicts on links.

    ``rows`` has the operations of each rank, by time.
    """
    costs, sizes = _matrix(rows)
    if not costs:
        return []
    floor_s = _SHARE * _step_s(rows)
    points = [(sizes[link][step], cost) for link in costs for step, cost in costs[link].items()]
    power, usual = growth(points, 1.0), median(size for size, _ in points)
    by_time = {
        link: {
            step: floor_s + cost * (usual / max(1, sizes[link][step])) ** power
            for step, cost in by.items()
        }
        for link, by in costs.items()
    }
    roles: dict[_Link, Hashable] = {(a, b): (rows[a][0].role, rows[b][0].role) for a, b in by_time}
    found = lags(by_time, roles, _TIMES)
    return list(_verdicts(found, set(by_time), rows)) if found else []


def _matrix(
    rows: Mapping[int, list[Operation]],
) -> tuple[dict[_Link, dict[int, float]], dict[_Link, dict[int, int]]]:
    """Return the seconds and bytes of each link in each step."""
    calls: dict[tuple[str, int, _Link], dict[int, Operation]] = defaultdict(dict)
    for rank, operations in rows.items():
        for one in operations:
            if len(one.members) == _PAIR and one.exit_s is not None and one.op:
                calls[one.comm, one.seq, (one.members[0], one.members[1])][rank] = one
    costs: dict[_Link, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    sizes: dict[_Link, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for (_, _, link), ends in calls.items():
        both = list(ends.values())
        if len(both) == _PAIR and both[0].clock == both[1].clock:
            began_s = max(one.enter_s for one in both)
            over_s = max(one.exit_s or 0.0 for one in both)
            step = both[0].step
            costs[link][step] += max(0.0, over_s - began_s)
            sizes[link][step] += max(one.size_bytes for one in both)
    return costs, sizes


def _step_s(rows: Mapping[int, list[Operation]]) -> float:
    """Return the median duration of a step."""
    begun: dict[int, list[float]] = defaultdict(list)
    for operations in rows.values():
        for one in operations:
            if not one.op:
                # Only the number of this call is known.
                continue
            begun[one.step] += (one.enter_s, one.exit_s or one.enter_s)
    return median(max(times) - min(times) for times in begun.values())


def _verdicts(
    found: Mapping[_Link, Lag], links: set[_Link], rows: Mapping[int, list[Operation]]
) -> Iterator[Verdict]:
    left = set(found)
    lines: list[tuple[FaultKind, int, set[_Link]]] = []
    for kind, end in ((FaultKind.SLOW_SENDER, 0), (FaultKind.SLOW_RECEIVER, 1)):
        for rank in {link[end] for link in found}:
            line = {link for link in links if link[end] == rank}
            if len(line) >= _PAIR and line <= set(found):
                lines.append((kind, rank, line))
    # The row explains a slow place where it crosses a healthy column.
    for kind, rank, line in sorted(lines, key=lambda one: (-len(one[2]), one[1])):
        if len(line & left) >= _PAIR:
            left -= line
            nodes = {node for one in rows[rank][:1] if (node := one.node)}
            yield _verdict(kind, Guilty.of([rank], (), nodes), line, found, rows)
    for link in sorted(left):
        ends = tuple(
            Alternative(kind, Guilty.of([link[end]]))
            for kind, end in ((FaultKind.SLOW_SENDER, 0), (FaultKind.SLOW_RECEIVER, 1))
            if sum(other[end] == link[end] for other in links) == 1
        )
        yield _verdict(FaultKind.SLOW_LINK, Guilty.of((), [link]), {link}, found, rows, ends)


def _verdict(
    kind: FaultKind,
    guilty: Guilty,
    line: set[_Link],
    found: Mapping[_Link, Lag],
    rows: Mapping[int, list[Operation]],
    alternatives: tuple[Alternative, ...] = (),
) -> Verdict:
    worst = max(line, key=lambda link: found[link].times)
    since = min(found[link].since_step for link in line)
    began = [one.enter_s for rank in worst for one in rows[rank] if one.step == since]
    told = ", ".join(f"{a} to {b}" for a, b in sorted(line))
    return Verdict(
        kind=kind,
        guilty=guilty,
        confidence=0.9 if not alternatives else 0.7,
        since_s=min(began, default=None),
        evidence=f"Transfers of rank {told} take up to {found[worst].times:.2f} times as long as "
        f"others or as before, from step {since} on.",
        alternatives=alternatives,
    )
