"""Histories of what steps cost ranks, healthy and faulty, through the production analyzer.

``python -m tests.support.slow_histories 100000 0`` runs so many healthy ones from a seed on, and
tells who was convicted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, TypeAlias

from orchestrator.diagnosis import Live, is_agreed, roles_of
from orchestrator.policies import GrowthRules, SlowRules
from orchestrator.policies.slow import SlowFacts, decide
from tests.support.histories import calm
from ucp_core.layout import ParallelLayout
from workers.protocol import Digest, StepCost

#: By rank and step: factor on the usual work, additional seconds, wait for data, tokens.
Work: TypeAlias = tuple[float, float, float, int]
Works: TypeAlias = Callable[[int, int], Work]
USUAL: Work = (1.0, 0.0, 0.001, 0)

LAYOUTS = (
    ParallelLayout(),
    ParallelLayout(dp_shard=2),
    ParallelLayout(dp_shard=4),
    ParallelLayout(dp_shard=8),
    ParallelLayout(pp=2),
    ParallelLayout(pp=2, dp_shard=2),
    ParallelLayout(pp=2, tp=2),
    ParallelLayout(tp=2, dp_shard=2),
    ParallelLayout(cp=2, dp_shard=4),
    ParallelLayout(pp=4),
)
NUM_STEPS = 60


class Place(NamedTuple):
    """The draws of a history, its layout and nodes, and the step from which it differs."""

    draw: Random
    layout: ParallelLayout
    began: int
    on_node: int
    step_s: float


@dataclass(frozen=True, slots=True)
class History:
    """A run of one layout: what is true of it, and whose work it slows."""

    layout: ParallelLayout
    on_node: int
    step_s: float
    works: Works
    noise: float = 0.02


def convicted(history: History, seed: int) -> tuple[int, str] | None:
    """Return in which step a rank was convicted, and the evidence; None if none was."""
    draw, layout = Random(seed), history.layout
    ranks = range(layout.world_size)
    live, rows = Live(roles_of(layout), 0), [calm(f"w{rank}", rank) for rank in ranks]
    at_s, usual_s = 0.0, 0.0
    for step in range(1, NUM_STEPS):
        took_s = 0.0
        costs = []
        for rank in ranks:
            times, more_s, data_s, tokens = history.works(rank, step)
            compute_s = history.step_s * times * draw.gauss(1.0, history.noise) + more_s
            costs.append(StepCost(step, compute_s, data_s, tokens))
            took_s = max(took_s, compute_s + data_s)
        at_s += took_s
        usual_s = took_s if step == 11 else usual_s
        for rank, cost in enumerate(costs):
            row = replace(rows[rank], step=step, digest=Digest(costs=(cost,)))
            live.take(rank, row, f"node{rank // history.on_node}", at_s)
        live.look(at_s)
        for one in live.suspicions:
            facts = SlowFacts(
                now_s=at_s, node=one.guilty.nodes[0], since_s=one.since_s,
                is_steady=one.is_steady, times=one.times, step_s=took_s, usual_step_s=usual_s,
                num_steps_left=100_000, pause_s=0.6, next_fault_s=40_000.0,
                is_agreed=is_agreed(one, live.suspicions, history.on_node),
            )  # fmt: skip
            if not one.may_be_work and decide(facts, SlowRules(), GrowthRules()).convict:
                return step, one.evidence
    return None


def _noise(_: Place) -> Works:
    return lambda *_: USUAL


def _work_of_stages_grows(at: Place) -> Works:
    """Longer sequences, a second head, layers that begin to train."""
    ends = at.draw.choice(
        [
            [at.draw.uniform(1.5, 8.0)] * at.layout.pp,
            [at.draw.uniform(1.5, 8.0) for _ in range(at.layout.pp)],
            [1.0] * (at.layout.pp - 1) + [at.draw.uniform(1.1, 2.0)],
            [at.draw.uniform(1.5, 3.0)] + [1.0] * (at.layout.pp - 1),
        ]
    )
    stages = [at.layout.coordinates(rank)["pp"] for rank in range(at.layout.world_size)]
    return lambda rank, step: (ends[stages[rank]] if step >= at.began else 1.0, 0.0, 0.001, 0)


def _long_samples_meet_one_rank(at: Place) -> Works:
    """Attention grows with the square; ranks of one part of the batch have the same tokens."""
    dp = max(at.layout.dp_shard, 1)
    many, grows = at.draw.uniform(1.2, 3.0), at.draw.uniform(0.8, 2.0)
    coordinates = [at.layout.coordinates(rank)["dp_shard"] for rank in range(at.layout.world_size)]
    long = at.draw.randrange(dp)
    first = at.draw.choice([0, at.began])
    jitter = at.draw.choice([0.0, 0.1])
    draws = Random(at.draw.random())
    parts: dict[tuple[int, int], float] = {}

    def works(rank: int, step: int) -> Work:
        part = coordinates[rank]
        more = many if part == long and step >= first else 1.0
        size = parts.setdefault((part, step), more * draws.lognormvariate(0.0, jitter))
        return size**grows, 0.0, 0.001, round(4096 * size)

    return works


def _pauses_of_one_rank(at: Place) -> Works:
    """Garbage collection, a recompile, an own save, an evaluation, a debugger, a suspended VM."""
    one, long_s, num = (
        at.draw.randrange(at.layout.world_size),
        at.draw.uniform(0.5, 60.0),
        at.draw.choice([1, 2]),
    )
    every = at.draw.choice([15, 20, 1000])
    return lambda rank, step: (
        1.0,
        long_s if rank == one and step >= at.began and (step - at.began) % every < num else 0.0,
        0.001,
        0,
    )


def _new_shapes_in_a_row(at: Place) -> Works:
    """Each of them compiles, with tokens of its own or without."""
    one, num = at.draw.randrange(at.layout.world_size), at.draw.randrange(1, 4)
    more_s = [at.draw.uniform(0.2, 8.0) for _ in range(num)]
    return lambda rank, step: (
        1.0,
        more_s[step - at.began] if rank == one and at.began <= step < at.began + num else 0.0,
        0.001,
        0,
    )


def _all_stall(at: Place) -> Works:
    """Storage that is slow for all, machines that are throttled together."""
    times, data_s = at.draw.uniform(1.0, 3.0), at.draw.choice([0.001, 1.0, 5.0])
    num = at.draw.choice([3, 20, 1000])
    return lambda _, step: (times, 0.0, data_s, 0) if at.began <= step < at.began + num else USUAL


def _stages_differ(at: Place) -> Works:
    each = [at.draw.uniform(0.3, 3.0) for _ in range(at.layout.pp)]
    stages = [at.layout.coordinates(rank)["pp"] for rank in range(at.layout.world_size)]
    return lambda rank, _: (each[stages[rank]], 0.0, 0.001, 0)


def _rank_0_logs(at: Place) -> Works:
    """Every few steps, by a third more."""
    every, times = at.draw.choice([3, 5, 10]), at.draw.uniform(1.05, 1.4)
    return lambda rank, step: (
        times if rank == 0 and step % every == 0 else 1.0, 0.0, 0.001, 0
    )  # fmt: skip


def _pauses_of_one_node(at: Place) -> Works:
    """A live migration, a flush of its disk: all its ranks stand still together."""
    node = at.draw.randrange(at.layout.world_size // at.on_node)
    long_s, num, every = (
        at.draw.uniform(0.5, 60.0),
        at.draw.choice([1, 2]),
        at.draw.choice([15, 20, 1000]),
    )
    return lambda rank, step: (
        1.0,
        long_s
        if rank // at.on_node == node and step >= at.began and (step - at.began) % every < num
        else 0.0,
        0.001,
        0,
    )


def _another_program_on_one_node(at: Place) -> Works:
    """For less than 3 s, once or again and again: all its ranks are as slow in each step."""
    node, times = at.draw.randrange(at.layout.world_size // at.on_node), at.draw.uniform(1.2, 3.0)
    num = max(1, int(at.draw.uniform(0.5, 2.5) / (at.step_s * times)))
    every = at.draw.choice([3 * num + 15, 1000])
    return lambda rank, step: (
        times
        if rank // at.on_node == node and step >= at.began and (step - at.began) % every < num
        else 1.0,
        0.0,
        0.001,
        0,
    )


def _clocks_wander(at: Place) -> Works:
    """Temperature and power: what a rank or a node takes in a step is like in the step before."""
    width = at.draw.choice([1, at.on_node])
    stays, spread = at.draw.uniform(0.5, 0.95), at.draw.uniform(0.005, 0.03)
    draws, known = Random(at.draw.random()), dict[tuple[int, int], float]()

    def wander(one: int, step: int) -> float:
        if (one, step) not in known:
            fresh = draws.gauss(0.0, spread * (1 - stays**2) ** 0.5 if step > 1 else spread)
            known[one, step] = fresh + (stays * known[one, step - 1] if step > 1 else 0.0)
        return known[one, step]

    return lambda rank, step: (1.0 + wander(rank // width, step), 0.0, 0.001, 0)


HEALTHY: Mapping[str, Callable[[Place], Works]] = {
    "noise": _noise,
    "work of stages grows": _work_of_stages_grows,
    "long samples meet one rank": _long_samples_meet_one_rank,
    "pauses of one rank": _pauses_of_one_rank,
    "new shapes in a row": _new_shapes_in_a_row,
    "all stall": _all_stall,
    "stages differ": _stages_differ,
    "rank 0 logs": _rank_0_logs,
    "pauses of one node": _pauses_of_one_node,
    "another program on one node": _another_program_on_one_node,
    "clocks wander": _clocks_wander,
}


def healthy(seed: int) -> tuple[str, History]:
    """Return a healthy history and its kind."""
    kind = Random(seed).choice(list(HEALTHY))
    return kind, history(kind, seed)


def history(kind: str, seed: int) -> History:
    """Return a history of a kind."""
    draw = Random(f"{kind} {seed}")
    layout = draw.choice(LAYOUTS)
    on_node = draw.choice([n for n in (1, 2, 4) if layout.world_size % n == 0])
    step_s, noise = draw.choice([0.1, 0.5, 2.0]), draw.uniform(0.005, 0.05)
    works = HEALTHY[kind](Place(draw, layout, draw.randrange(12, 40), on_node, step_s))
    return History(layout, on_node, step_s, works, noise)


def main(num: int, first: int) -> int:
    """Run healthy histories; return how many had a conviction."""
    kinds: Counter[str] = Counter()
    bad: list[str] = []
    for seed in range(first, first + num):
        kind, history = healthy(seed)
        kinds[kind] += 1
        if (found := convicted(history, seed)) is not None:
            bad.append(f"seed {seed}: {kind}, {history.layout}, step {found[0]}: {found[1]}")
            print(bad[-1], flush=True)
        if (seed - first) % 1000 == 999:
            print(f"{seed - first + 1} histories, {len(bad)} with a conviction", flush=True)
    print(f"{num} healthy histories {dict(kinds)}: {len(bad)} with a conviction")
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
