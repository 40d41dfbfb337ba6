"""Find ranks that are slower than others with the same work.

Compute is the time of a rank's span without its waits for others; if the record has no such time,
the calls within the span are subtracted. Ranks of one stage and tensor-parallel place are compared
in the same step, by their fastest micro-batch: broken hardware slows all micro-batches, uneven work
only some. If sizes are known, times are divided by the power of the size, at most 2, with which
they grow. Two peers are too few: then a rank is compared with its own past, relative to that of all
others. The threshold grows with the noise of the others. Rules that blame the rank that waits least
or comes late would name healthy ranks in the pipeline and the receivers of slow links (seen in the
trace AR of ByteDance-Seed/StragglerAnalysis).
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Final, NamedTuple, TypeAlias, TypeVar

from orchestrator.diagnosis.records import Operation
from orchestrator.diagnosis.verdicts import Guilty, Verdict, listed
from orchestrator.fault_kinds import FaultKind

#: Windows: the width in steps, and the logarithm of the ratio from which the median counts. The
#: first finds large slowdowns, the second small or intermittent ones.
_LANES: Final = ((5, math.log(1.25)), (15, math.log(1.12)))
#: A key can stand out only if one of its last ``NUM_RECENT`` steps has at least ``LEAST_LOG``.
NUM_RECENT: Final = 8
LEAST_LOG: Final = math.log(1.12)
_WINDOW_MIN: Final = 3
#: The first steps of a rank are its past.
NUM_PAST: Final = 5
#: With this many ranks or fewer, a role does not show which of them is slow.
NUM_PEERS_FEW: Final = 2
#: The threshold is this many times the upper quartile of the others' windows, and this many times
#: the deviation of their steps over the root of the window's width: at least 5 standard deviations
#: of either.
_NOISE_QUANTILE: Final = 0.75
_APART_TIMES: Final = 7.5
_NOISE_TIMES: Final = 7.0
#: Noise is estimated from at most this many others.
_OTHERS_MAX: Final = 500
#: Attention grows with the square of the size.
POWER_MAX: Final = 2.0
#: Sizes that differ by less, about a millionth, show no growth.
_ACROSS_MIN: Final = 1e-12
_COMPUTE: Final = ("forward", "backward")

ALONE: Final = " It has no peer: its work may have grown, or its machine may be busy."

K = TypeVar("K", bound=Hashable)
#: Cost of each key in each step.
Series = Mapping[K, Mapping[int, float]]
#: The number of costs, then the sums of the logarithms of sizes and of costs, of the former's
#: squares, and of the products.
Moments: TypeAlias = tuple[float, float, float, float, float]


class Lag(NamedTuple):
    """How many times slower a key is than it should be, and since which step."""

    times: float
    since_step: int


def growth(sizes_costs: Iterable[tuple[float, float]], most: float) -> float:
    """Return the power of the size by which costs grow, 0 to ``most``; 0 if a size is unknown."""
    return power([moments(sizes_costs)], most)


def moments(sizes_costs: Iterable[tuple[float, float]]) -> Moments:
    """Return the sums of some costs that ``power`` needs; nan if a size is unknown."""
    logs = [
        (math.log(size) if size > 0.0 else math.nan, math.log(cost))
        for size, cost in sizes_costs
        if cost > 0.0
    ]
    return (
        len(logs),
        sum(x for x, _ in logs),
        sum(y for _, y in logs),
        sum(x * x for x, _ in logs),
        sum(x * y for x, y in logs),
    )


def power(parts: Iterable[Moments], most: float = POWER_MAX) -> float:
    """Return the ``growth`` of all costs that make up ``parts``."""
    num, x, y, xx, xy = (sum(each) for each in zip(*parts, strict=True))
    across = xx - x * x / num if num else 0.0
    return min(max((xy - x * y / num) / across, 0.0), most) if across > _ACROSS_MIN * num else 0.0


def lags(
    series: Series[K],
    roles: Mapping[K, Hashable],
    least_times: float = 1.0,
    *,
    stages: Mapping[K, Hashable] | None = None,
    nodes: Mapping[K, Hashable] | None = None,
) -> dict[K, Lag]:
    """Return the keys that cost ``least_times`` more than others of their role, or than before.

    ``stages`` are as for ``logs``, ``nodes`` as for ``lagging``.
    """
    num_peers = Counter(roles[key] for key in series)
    past = {
        key: (steps[NUM_PAST - 1], median(costs[step] for step in steps[:NUM_PAST]))
        for key, costs in series.items()
        if len(steps := sorted(costs)) >= NUM_PAST + _WINDOW_MIN
    }
    by_step: dict[int, dict[K, float]] = defaultdict(dict)
    for key, costs in series.items():
        for step, cost in costs.items():
            by_step[step][key] = cost
    slower: dict[K, dict[int, float]] = {key: {} for key in series}
    for step, of_step in by_step.items():
        known = {key: usual for key, (last, usual) in past.items() if step > last}
        for key, log in logs(of_step, roles, num_peers, known, stages).items():
            slower[key][step] = log
    by_past = {key for key in series if num_peers[roles[key]] <= NUM_PEERS_FEW}
    return lagging(slower, by_past, least_times, nodes=nodes)


def stage_of(role: Hashable) -> Hashable:
    """Return the stage of a role; the work of all ranks of a stage grows together."""
    return role[0] if isinstance(role, tuple) and role else role


def logs(
    costs: Mapping[K, float],
    roles: Mapping[K, Hashable],
    num_peers: Mapping[Hashable, int],
    past: Mapping[K, float],
    stages: Mapping[K, Hashable] | None = None,
) -> dict[K, float]:
    """Return the logarithm of the ratio of each cost of a step to what it should be.

    Args:
        costs: Cost of each key.
        num_peers: Number of keys of each role, whether or not they are in ``costs``.
        past: The usual earlier cost of a key. A key with few peers is not judged without it.
        stages: Stage of each key: growth over its own past is not a fault if its whole stage grew
            alike.
    """
    same: dict[Hashable, list[float]] = defaultdict(list)
    for key, cost in costs.items():
        same[roles[key]].append(cost)
    for each in same.values():
        each.sort()
    # No rank is to blame for a step that is slow for all.
    is_few = any(num_peers[role] <= NUM_PEERS_FEW for role in same)
    grown = sorted(cost / past[key] for key, cost in costs.items() if key in past) if is_few else []
    by_stage = stages if is_few and stages else {}
    of_stage: dict[Hashable, list[float]] = defaultdict(list)
    for key, stage in by_stage.items():
        if key in past and key in costs:
            of_stage[stage].append(costs[key] / past[key])
    for each in of_stage.values():
        each.sort()
    found: dict[K, float] = {}
    for key, cost in costs.items():
        ordered = same[roles[key]]
        if num_peers[roles[key]] > NUM_PEERS_FEW:
            if len(ordered) > NUM_PEERS_FEW:
                usual = _without(ordered, (cost,), (len(ordered) - 2) // 2)
                found[key] = math.log(cost / usual)
        elif key in past:
            mine = cost / past[key]
            all_s = _median_without(grown, (mine,)) if len(grown) > 1 else 1.0
            alike = of_stage[by_stage[key]] if key in by_stage else []
            stage_s = _median_without(alike, (mine,)) if len(alike) > 1 else 1.0
            found[key] = math.log(mine / max(1.0, all_s, stage_s))
    return found


def lagging(
    slower: Mapping[K, Mapping[int, float]],
    by_past: Collection[K],
    least_times: float = 1.0,
    *,
    now: Collection[K] | None = None,
    nodes: Mapping[K, Hashable] | None = None,
) -> dict[K, Lag]:
    """Return the keys whose logarithms stand out from the noise of the others.

    Args:
        slower: The result of ``logs`` for each key, by step.
        by_past: Keys that are compared with their own past; a past of few steps adds noise.
        now: Return only those of these keys whose newest, complete window stands out. None for all
            keys of which any window does.
        nodes: Node of each key. A fault of a node slows all its ranks, so the others are those on
            other nodes.
    """
    found: dict[K, Lag] = {}
    is_live = now is not None
    for width, floor in _LANES:
        looked = {
            key: list(_windows(slower[key], width, is_live=is_live))
            for key in (slower if now is None else now)
        }
        apart = [key for key, each in looked.items() if any(value > floor for _, value in each)]
        if not apart:
            continue
        others = list(slower)[:: max(1, len(slower) // _OTHERS_MAX)]
        compared = {key: slower[key] for key in dict.fromkeys((*apart, *others)) if slower[key]}
        levels = {
            key: [max(value, 0.0) for _, value in _windows(by, width)]
            for key, by in compared.items()
        }
        ordered = sorted(value for each in levels.values() for value in each)
        spreads = {key: _spread([by[step] for step in sorted(by)]) for key, by in compared.items()}
        ordered_spreads = sorted(spreads.values())
        on_node: dict[Hashable, list[K]] = defaultdict(list)
        for key in compared:
            on_node[nodes.get(key) if nodes else key].append(key)
        for key in apart:
            mates = on_node[nodes.get(key) if nodes else key]
            if len(mates) == len(compared):
                mates = [key]
            without = [value for mate in mates for value in levels[mate]]
            num_others = len(ordered) - len(without)
            place = int(_NOISE_QUANTILE * (num_others - 1))
            level = _without(ordered, without, place) if num_others else 0.0
            own = [spreads[mate] for mate in mates] if len(spreads) > 1 else []
            shares = 1.0 / width + (1.0 / NUM_PAST if key in by_past else 0.0)
            noise = _median_without(ordered_spreads, own) * math.sqrt(shares)
            bound = max(floor, math.log(least_times), _APART_TIMES * level, _NOISE_TIMES * noise)
            first = next((steps for steps, value in looked[key] if value > bound), None)
            if first is not None and key not in found:
                since = next(step for step in first if slower[key][step] > floor)
                after = [value for step, value in slower[key].items() if step >= since]
                found[key] = Lag(math.exp(median(after)), since)
    return found


def _without(ordered: Sequence[float], own: Sequence[float], place: int) -> float:
    """Return the value at index ``place`` of ``ordered`` after removing ``own`` from it."""
    if len(own) == 1:
        return ordered[place + (bisect_left(ordered, own[0]) <= place)]
    last = -1
    for value in sorted(own):
        last = max(bisect_left(ordered, value), last + 1)
        if last > place:
            break
        place += 1
    return ordered[place]


def _median_without(ordered: Sequence[float], own: Sequence[float]) -> float:
    num = len(ordered) - len(own)
    return fmean(_without(ordered, own, place) for place in ((num - 1) // 2, num // 2))


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation, from the median of differences between consecutive steps.

    A shift of the level is not noise: if half of the ranks get slow, the others' level shifts.
    """
    apart = [abs(after - before) for before, after in pairwise(values)]
    return 1.4826 * median(apart) / math.sqrt(2.0) if apart else 0.0


def _windows(
    by_step: Mapping[int, float], width: int, *, is_live: bool = False
) -> Iterator[tuple[list[int], float]]:
    steps = sorted(by_step)
    is_short = len(steps) < width == _LANES[0][0] and len(steps) >= _WINDOW_MIN
    if is_short and not is_live:
        width = len(steps)
    for end in range(max(width, len(steps)) if is_live else width, len(steps) + 1):
        window = steps[end - width : end]
        yield window, median_low([by_step[step] for step in window])


def is_whole_stage(rank: int, roles: Mapping[int, Hashable]) -> bool:
    """Return whether a rank is alone on its stage, or in the run.

    Then a slow machine looks the same as more work, or as other programs on a healthy one.
    """
    stage = stage_of(roles[rank])
    return sum(stage_of(one) == stage for one in roles.values()) == 1


def slow_ranks(rows: Mapping[int, list[Operation]]) -> list[Verdict]:
    """Return the verdicts on ranks that compute or load data slowly.

    ``rows`` has the operations of each rank, by time.
    """
    spans = {rank: _spans(operations) for rank, operations in rows.items()}
    roles = {rank: operations[0].role for rank, operations in rows.items()}
    points: dict[tuple[Hashable, str], list[tuple[float, float]]] = defaultdict(list)
    for rank, by_span in spans.items():
        for (_, op), each in by_span.items():
            points[roles[rank], op] += [(size, own_s) for _, own_s, size in each]
    powers = {key: growth(each, POWER_MAX) for key, each in points.items() if key[1] in _COMPUTE}
    compute = {
        rank: _compute(by, {op: powers[role, op] for role, op in powers if role == roles[rank]})
        for rank, by in spans.items()
    }
    nodes = {rank: operations[0].node or rank for rank, operations in rows.items()}
    stages = {rank: stage_of(role) for rank, role in roles.items()}
    found = lags(_known(compute), roles, stages=stages, nodes=nodes)
    usual_s: dict[Hashable, float] = {}
    for rank, by in spans.items():
        if compute[rank]:
            mine_s = median(_compute(by, {}).values())
            usual_s[roles[rank]] = min(mine_s, usual_s.get(roles[rank], mine_s))
    data = _known({rank: _data(spans[rank], usual_s.get(roles[rank], 0.0)) for rank in rows})
    starved = lags(data, roles, stages=stages, nodes=nodes)
    return [
        *_verdicts(FaultKind.SLOW_COMPUTE, "computes", found, rows, roles),
        *_verdicts(FaultKind.SLOW_DATA, "takes, with its waits for data,", starved, rows, roles),
    ]


def _verdicts(
    kind: FaultKind,
    does: str,
    found: Mapping[int, Lag],
    rows: Mapping[int, list[Operation]],
    roles: Mapping[int, Hashable],
) -> Iterator[Verdict]:
    for rank, lag in sorted(found.items()):
        same = [other for other in roles if other != rank and roles[other] == roles[rank]]
        is_alone = is_whole_stage(rank, roles)
        beside = listed(same) if len(same) >= NUM_PEERS_FEW else "it did before"
        began = [one.enter_s for one in rows[rank] if one.step == lag.since_step]
        yield Verdict(
            kind=kind,
            guilty=Guilty.of([rank], (), {node for one in rows[rank][:1] if (node := one.node)}),
            confidence=0.5 if is_alone else 0.9,
            since_s=min(began),
            evidence=f"Rank {rank} {does} {lag.times:.2f} times as long as {beside}, from step "
            f"{lag.since_step} on." + (ALONE if is_alone else ""),
        )


def _spans(
    operations: Sequence[Operation],
) -> dict[tuple[int, str], list[tuple[float, float, int]]]:
    """Return (enter, own time, size) of the spans that have ended, by step and name."""
    found: dict[tuple[int, str], list[tuple[float, float, int]]] = defaultdict(list)
    for place, span in enumerate(operations):
        if not span.is_span or span.exit_s is None:
            continue
        known, until_s = span.own_s is not None, span.enter_s
        own_s = span.exit_s - span.enter_s if span.own_s is None else span.own_s
        for one in operations[place + 1 :]:
            if known or one.enter_s >= span.exit_s:
                break
            if not one.is_span:
                end_s = min(span.exit_s, span.exit_s if one.exit_s is None else one.exit_s)
                own_s -= max(0.0, end_s - max(until_s, one.enter_s))
                until_s = max(until_s, end_s)
        found[span.step, span.op].append((span.enter_s, max(own_s, 0.0), span.size_bytes))
    return found


def _compute(
    spans: Mapping[tuple[int, str], list[tuple[float, float, int]]], powers: Mapping[str, float]
) -> dict[int, float]:
    """Return, by step, the time of the fastest micro-batch, divided by the power of its size."""
    steps: dict[int, float] = defaultdict(float)
    for (step, op), each in spans.items():
        if op in _COMPUTE:
            power = powers.get(op, 0.0)
            steps[step] += min(own_s / size**power if power else own_s for _, own_s, size in each)
    return steps


def _data(
    spans: Mapping[tuple[int, str], list[tuple[float, float, int]]], usual_s: float
) -> dict[int, float]:
    """Return, by step, how long a micro-batch waits for data, plus its role's usual compute time.

    A wait that is short compared with that does not matter, however often it doubles.
    """
    return {
        step: usual_s + sum(own_s for _, own_s, _ in each) / len(each)
        for (step, op), each in spans.items()
        if op == "data" and usual_s
    }


def _known(series: Series[K]) -> dict[K, dict[int, float]]:
    """Return the costs that are above zero."""
    kept = {
        key: {step: cost for step, cost in by.items() if cost > 0.0} for key, by in series.items()
    }
    return {key: by for key, by in kept.items() if by}
