"""Find dead and slow links by what the kernels at both ends of connections report.

Pure. A link is dead if its packets are repeated and never acknowledged, however long a step takes.
A frozen receiver is not a dead link: its kernel acknowledges. On a slow link, bytes are on their
way for longer than elsewhere. A ring, where each rank sends to one other, does not show which end
is at fault (C4, arXiv 2406.04594, section 3, compares rows and columns of a matrix). So keepers
time transfers between all pairs of a few nodes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, TypeAlias

from orchestrator.diagnosis.flows import Flows, Transfer
from orchestrator.diagnosis.verdicts import Alternative, Guilty, Suspicion, Verdict
from orchestrator.fault_kinds import FaultKind

#: A packet was repeated twice, after at least 0.2 s and 0.4 s, and no answer came for this long.
_BACKOFF: Final = 2
_UNHEARD_S: Final = 1.0
#: A link is slow if it is more than this many times as slow as others: no network is even, and
#: probing it disturbs.
SLOWER: Final = 2.0
#: The same for a transfer that keepers time, which is short.
_TIMED_SLOWER: Final = 2.5
#: Links that carry fewer bytes, or are busy for a smaller share of the time, delay no rank.
_BYTES_MIN: Final = 256 << 10
_BUSY_SHARE: Final = 0.1
#: How many nodes time transfers among each other: all pairs in six rounds.
NUM_TIMED: Final = 4

#: (sender, receiver): nodes, by name.
Pair: TypeAlias = tuple[str, str]


def dead(flows: Flows, ranks: Mapping[str, int], at_s: float) -> list[Suspicion]:
    """Return the links between members whose packets do not arrive at ``at_s``.

    ``ranks`` has the rank of each member.
    """
    unheard_s: dict[tuple[str, str], float] = {}
    for sender, receiver, flow in flows.waiting():
        is_member = sender in ranks and receiver in ranks
        # A kernel that only probes for room backs off as well, but has nothing in flight.
        is_held = flow.in_flight and flow.backoff >= _BACKOFF and flow.heard_ms >= 1e3 * _UNHEARD_S
        if is_member and is_held:
            ends = (sender, receiver)
            unheard_s[ends] = max(unheard_s.get(ends, 0.0), 1e-3 * flow.heard_ms)
    return [
        Suspicion(
            kind=FaultKind.LINK_DEAD,
            guilty=Guilty.of(links=[(ranks[sender], ranks[receiver])]),
            confidence=0.9,
            since_s=at_s - for_s,
            evidence=f"Data from rank {ranks[sender]} ({sender}) to rank {ranks[receiver]} "
            f"({receiver}) is sent again and again without an acknowledgement.",
        )
        for (sender, receiver), for_s in unheard_s.items()
    ]


def suspects(transfers: Mapping[Pair, Transfer], for_s: float) -> list[Pair]:
    """Return the links that are slower than others in the last ``for_s`` seconds, slowest first."""
    known = costs(transfers)
    if len(known) < 2:  # noqa: PLR2004
        return []
    usual = _usual(known)
    found = [
        pair
        for pair, cost in known.items()
        if cost > SLOWER * usual
        and transfers[pair].busy_s - transfers[pair].waited_s >= _BUSY_SHARE * for_s
    ]
    return sorted(found, key=lambda pair: (-known[pair], pair))


def step_ratio(transfers: Mapping[Pair, Transfer], for_s: float) -> float:
    """Return the step time if the slowest link were as fast as others, divided by the current one.

    While that link is busy, the others wait for it.
    """
    known = costs(transfers)
    if len(known) < 2:  # noqa: PLR2004
        return 1.0
    slowest = max(known, key=lambda pair: known[pair])
    one = transfers[slowest]
    share = min(1.0, max(0.0, one.busy_s - one.waited_s) / for_s)
    return 1.0 - share * (1.0 - _usual(known) / known[slowest])


def costs(transfers: Mapping[Pair, Transfer]) -> dict[Pair, float]:
    """Return the seconds on the way per byte, for links that carry enough bytes."""
    return {
        pair: (one.busy_s - one.waited_s) / one.num_bytes
        for pair, one in transfers.items()
        if one.num_bytes >= _BYTES_MIN
    }


def _usual(known: Mapping[Pair, float]) -> float:
    # Take the lower of two: otherwise, of two links, a slow one could be the usual one.
    return sorted(known.values())[(len(known) - 1) // 2]


def to_time(found: Sequence[Pair], nodes: Collection[str]) -> list[str]:
    """Return the nodes that should time transfers among each other: suspects first."""
    ends = dict.fromkeys(end for pair in found for end in pair)
    return [*ends, *sorted(set(nodes) - ends.keys())][:NUM_TIMED]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return all pairs of ``nodes``, in rounds in which each node sends or receives, but not both.

    If a node did both, its sending would delay its answers.
    """
    ring: list[str] = [*nodes, *([""] if len(nodes) % 2 else [])]
    planned: list[list[Pair]] = []
    for _ in range(len(ring) - 1):
        pairs = [(a, b) for a, b in zip(ring, reversed(ring), strict=True) if a and b]
        pairs = [pair for pair in pairs if ring.index(pair[0]) < len(ring) // 2]
        planned += [pairs, [(b, a) for a, b in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return planned


def slow(
    rates: Mapping[Pair, float],
    found: Collection[Pair],
    ranks: Mapping[str, Sequence[int]],
    trained: Mapping[Pair, float],
) -> list[Verdict]:
    """Return the verdicts on suspected links that were timed; [] if they are as fast as others.

    A row of the matrix that is mostly slow points to a sender, a column to a receiver; the rest are
    links. Answers pass a slow end, too, so a node's row and column may both be slow: the slower one
    counts, and the other is an alternative.

    Args:
        rates: Bytes a second, for all pairs of some nodes.
        found: The links that are suspected.
        ranks: The ranks of each node.
        trained: Bytes a second that training sends in the meantime. A timed transfer only gets the
            rest, so this is added to its rate: a full link must not be compared with idle ones.
    """
    timed = set(found) & rates.keys()
    if len(rates) < 2 or not timed:  # noqa: PLR2004
        return []
    usual = median(sorted(rates.values())[len(rates) // 2 :])
    sent: dict[str, float] = defaultdict(float)
    heard: dict[str, float] = defaultdict(float)
    for (sender, receiver), rate in trained.items():
        sent[sender] += rate
        heard[receiver] += rate
    left = {
        (sender, receiver)
        for (sender, receiver), rate in rates.items()
        if (rate + max(sent[sender], heard[receiver])) * _TIMED_SLOWER < usual
    }
    verdicts: list[Verdict] = []
    ends: set[str] = set()
    lines = list(_lines(rates, left))
    for kind, node, line in lines:
        # The row explains a slow place where it crosses a healthy column.
        if node not in ends and len(line & left) > 1 and line & timed:
            left -= line
            ends.add(node)
            guilty = Guilty.of(ranks.get(node, ()), (), (node,))
            others = tuple(
                Alternative(each, guilty) for each, end, _ in lines if end == node and each != kind
            )
            verdicts.append(_verdict(kind, guilty, line, rates, usual, others))
    for pair in sorted(pair for pair in left & timed if ends.isdisjoint(pair)):
        joined = [(a, b) for a in ranks.get(pair[0], ()) for b in ranks.get(pair[1], ())]
        guilty = Guilty.of((), joined, ())
        is_open = len(rates) == 2  # noqa: PLR2004  two nodes allow no other comparison
        kinds = (
            ((FaultKind.SLOW_SENDER, pair[0]), (FaultKind.SLOW_RECEIVER, pair[1]))
            if is_open
            else ()
        )
        others = tuple(
            Alternative(kind, Guilty.of(ranks.get(node, ()), (), (node,))) for kind, node in kinds
        )
        verdicts.append(_verdict(FaultKind.SLOW_LINK, guilty, {pair}, rates, usual, others))
    return verdicts


def _lines(
    rates: Mapping[Pair, float], left: set[Pair]
) -> Iterator[tuple[FaultKind, str, set[Pair]]]:
    """Yield the rows and columns that are slow in at least two thirds, the slowest first."""
    lines: list[tuple[float, FaultKind, str, set[Pair]]] = []
    for kind, end in ((FaultKind.SLOW_SENDER, 0), (FaultKind.SLOW_RECEIVER, 1)):
        for node in sorted({pair[end] for pair in left}):
            line = {pair for pair in rates if pair[end] == node}
            if len(line & left) >= max(2, 2 * len(line) / 3):
                lines.append((median(rates[pair] for pair in line), kind, node, line))
    for _, kind, node, line in sorted(lines, key=lambda one: one[0]):
        yield kind, node, line


def _verdict(
    kind: FaultKind,
    guilty: Guilty,
    pairs: Collection[Pair],
    rates: Mapping[Pair, float],
    usual: float,
    alternatives: tuple[Alternative, ...] = (),
) -> Verdict:
    worst = min(pairs, key=lambda pair: (rates[pair], pair))
    told = ", ".join(f"{a[:8]} to {b[:8]}" for a, b in sorted(pairs))
    return Verdict(
        kind=kind,
        guilty=guilty,
        confidence=0.6 if alternatives else 0.9,
        evidence=f"Keepers sent {1e-6 * rates[worst]:.3g} MB/s from node {told}, and "
        f"{1e-6 * usual:.3g} MB/s between others.",
        alternatives=alternatives,
    )
