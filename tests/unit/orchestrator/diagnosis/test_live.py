"""Suspicions of a run while it trains, from reports as keepers send them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from random import Random

import pytest

from orchestrator.diagnosis import Guilty, Live, Suspicion, roles_of
from orchestrator.fault_kinds import FaultKind
from tests.support.histories import calm, group
from tests.support.slow_histories import HEALTHY, NUM_STEPS, History, convicted, history
from tests.support.traces import Trace, clean, place_of, planted, step_costs
from ucp_core.layout import ParallelLayout
from workers.protocol import Digest, StepCost, WorkerReport


def reported(rank: int, cost: StepCost) -> WorkerReport:
    return replace(calm(f"w{rank}", rank), step=cost.step, digest=Digest(costs=(cost,)))


class Watched:
    """An attempt whose ranks report once a step, and the suspicions that came of it."""

    def __init__(self, roles: list[tuple[int, int]], step_s: float = 2.0) -> None:
        self.live = Live(roles, 0)
        self.step_s = step_s
        self.told: list[tuple[int, tuple[Suspicion, ...]]] = []

    def step(self, costs: Mapping[int, StepCost]) -> None:
        for rank, cost in costs.items():
            at_s = self.step_s * cost.step
            self.live.take(rank, reported(rank, cost), f"node{rank}", at_s)
        if self.live.look(at_s):
            self.told.append((cost.step, self.live.suspicions))

    def watch(self, trace: Trace) -> set[tuple[FaultKind, int]]:
        for _, costs in sorted(step_costs(trace).items()):
            self.step(costs)
        return {(one.kind, one.guilty.ranks[0]) for _, told in self.told for one in told}


def even(
    step: int, num: int = 4, slow: Iterable[int] = (), times: float = 3.0
) -> dict[int, StepCost]:
    return {
        rank: StepCost(step, 0.1 * (times if rank in slow else 1.0) + 0.001 * rank, 0.001)
        for rank in range(num)
    }


@pytest.mark.parametrize("kind", ["slow_compute", "slow_data"])
def test_a_slow_rank_is_suspected_in_time_and_no_other(kind: str) -> None:
    """In 4 steps where it takes 3 times as long, in 10 where 1.5 times.

    Where sizes differ from one micro-batch to the next, digests do not tell what is owed to them.
    """
    num = 0
    for seed in range(16):
        trace = planted(kind, seed)
        if "uneven='tokens'" in trace.what or "onset=0" in trace.what:
            continue
        num += 1
        onset = int(trace.what.partition("onset=")[2].partition(",")[0])
        is_much = "factor=3.0" in trace.what
        watched = Watched(place_of(trace))
        assert watched.watch(trace) == {(FaultKind(kind), trace.ranks[0])}, trace.what
        assert watched.told[0][0] <= onset + (4 if is_much else 10) - 1, trace.what
    assert num >= 5


@pytest.mark.parametrize("kind", ["jitter", "stages", "recompiles", "pauses", "tokens"])
def test_uneven_work_and_pauses_are_no_slow_ranks(kind: str) -> None:
    for seed in range(1000, 1004):
        trace = clean(kind, seed)
        assert Watched(place_of(trace)).watch(trace) == set(), trace.what


@pytest.mark.parametrize("num", [4, 2])
def test_a_suspicion_tells_since_when_and_lasts_until_the_rank_is_well(num: int) -> None:
    """Two ranks cannot tell which is slow: their past does, and it stays as it was meanwhile."""
    watched = Watched([(0, 0)] * num)
    for step in range(1, 90):
        watched.step(even(step, num, slow=[1] if 20 <= step < 60 else []))
    (first, opened), (last, closed) = watched.told[0], watched.told[-1]
    (one,) = opened
    assert (one.kind, one.worker, one.guilty.nodes) == (FaultKind.SLOW_COMPUTE, "w1", ("node1",))
    assert 20 <= first <= 23
    assert one.since_s == 20 * watched.step_s
    assert one.times == pytest.approx(3.0, rel=0.05)
    beside = "ranks 0, 2, 3" if num > 2 else "it did before"
    assert one.evidence == (
        f"Rank 1 (w1 on node node1) computes {one.times:.2f} times as long as {beside}, "
        "from step 20 on."
    )
    assert not closed
    assert 60 <= last <= 75, "it was well again"


def suspects_of(
    layout: ParallelLayout, times: Callable[[int, int], float], seed: int, on_node: int = 1
) -> list[tuple[int, tuple[Suspicion, ...]]]:
    """Return who was suspected after each step from 21 on of a run with noise of a fiftieth."""
    draw = Random(seed)
    live = Live(roles_of(layout), 0)
    told = []
    for step in range(1, 90):
        for rank in range(layout.world_size):
            cost = StepCost(step, 0.1 * times(rank, step) * draw.gauss(1.0, 0.02), 0.001)
            live.take(rank, reported(rank, cost), f"node{rank // on_node}", 2.0 * step)
        live.look(2.0 * step)
        told.append((step, live.suspicions))
    return told[20:]


@pytest.mark.parametrize(
    ("layout", "by_stage"),
    [
        (ParallelLayout(pp=2), (6.0, 4.5)),
        (ParallelLayout(pp=2), (1.0, 1.4)),
        (ParallelLayout(pp=2, dp_shard=2), (3.0, 1.0)),
        (ParallelLayout(pp=2, tp=2), (1.0, 1.4)),
        (ParallelLayout(tp=2, dp_shard=2), (4.0,)),
        (ParallelLayout(dp_shard=2), (4.0,)),
    ],
    ids=str,
)
def test_work_that_grows_on_a_whole_stage_convicts_no_rank(
    layout: ParallelLayout, by_stage: tuple[float, ...]
) -> None:
    """Longer sequences, a second head, layers that begin to train: stages do not grow alike."""
    for seed in range(3):
        began = Random(seed).randrange(12, 40)

        def times(rank: int, step: int, began: int = began) -> float:
            return by_stage[layout.coordinates(rank)["pp"]] if step >= began else 1.0

        told = suspects_of(layout, times, seed)
        assert all(one.may_be_work for _, each in told for one in each), seed
        is_alone = layout.world_size == layout.pp
        assert is_alone or not any(each for _, each in told), seed


@pytest.mark.parametrize("lasts", [10, 1000])
def test_one_that_trains_alone_is_suspected_and_not_convicted(lasts: int) -> None:
    """The others of its machine begin, or its work grows: its own past is all that there is."""

    def times(_: int, step: int) -> float:
        return 4.0 if 20 <= step < 20 + lasts else 1.0

    told = suspects_of(ParallelLayout(), times, 0)
    found = [one for _, each in told for one in each]
    assert found
    assert all(one.may_be_work for one in found)
    assert found[0].evidence.startswith("Rank 0 (w0 on node node0) computes ")
    assert found[0].evidence.endswith(
        " times as long as it did before, from step 20 on. It has no peer: its work may have "
        "grown, or its machine may be busy."
    )
    assert bool(told[-1][1]) == (lasts == 1000)
    lone = History(ParallelLayout(), 1, 0.25, lambda rank, step: (times(rank, step), 0, 0.001, 0))
    assert convicted(lone, 0) is None


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(dp_shard=2), ParallelLayout(tp=2), ParallelLayout(pp=2, dp_shard=2)],
    ids=str,
)
def test_one_slow_rank_of_a_stage_is_no_work_that_grew(layout: ParallelLayout) -> None:
    for seed in range(3):
        told = suspects_of(
            layout, lambda rank, step: 1.5 if rank and step >= 20 and rank < 2 else 1, seed
        )
        assert {one.guilty.ranks for _, each in told for one in each} == {(1,)}, seed
        assert not any(one.may_be_work for step, each in told if step >= 35 for one in each)
        assert next(step for step, each in told if each) < 35


@pytest.mark.parametrize(("num_nodes", "on_node"), [(2, 8), (3, 8), (2, 2), (3, 4)])
@pytest.mark.parametrize(("factor", "began"), [(3.0, 0), (1.5, 0), (1.5, 20)])
def test_a_slow_node_is_found_and_stays_suspected(
    num_nodes: int, on_node: int, factor: float, began: int
) -> None:
    """Its own ranks are a large part of all: they were taken for the noise of the others."""
    layout = ParallelLayout(dp_shard=num_nodes * on_node)
    last = (num_nodes - 1) * on_node
    for seed in range(2):
        told = suspects_of(
            layout,
            lambda rank, step: factor if rank >= last and step >= began else 1.0,
            seed,
            on_node,
        )
        assert {rank for _, each in told for one in each for rank in one.guilty.ranks} == {
            *range(last, layout.world_size)
        }
        assert all(each for step, each in told if step >= began + 5), "it is not withdrawn"


@pytest.mark.parametrize("step_s", [0.5, 2.0])
@pytest.mark.parametrize(
    ("layout", "on_node"),
    [
        (ParallelLayout(dp_shard=4), 2),
        (ParallelLayout(dp_shard=16), 2),
        (ParallelLayout(dp_shard=16), 8),
        (ParallelLayout(tp=2, dp_shard=2), 2),
        (ParallelLayout(cp=2, dp_shard=4), 4),
        (ParallelLayout(pp=2, dp_shard=4), 2),
    ],
    ids=str,
)
def test_a_slow_node_is_convicted_within_fifteen_steps(
    layout: ParallelLayout, on_node: int, step_s: float
) -> None:
    """Half-way all others seemed noisy: against a node of half of the ranks they got faster."""
    for seed in range(6):
        draw = Random(seed)
        node, began = draw.randrange(layout.world_size // on_node), draw.randrange(12, 40)

        def works(
            rank: int, step: int, node: int = node, began: int = began
        ) -> tuple[float, float, float, int]:
            return 1.5 if rank // on_node == node and step >= began else 1.0, 0.0, 0.001, 0

        one = History(layout, on_node, step_s, works, draw.choice([0.005, 0.02, 0.05]))
        step, evidence = convicted(one, seed) or (NUM_STEPS, "")
        assert began + 5 < step < began + 15, (seed, evidence)
        assert f"on node node{node})" in evidence


@pytest.mark.parametrize(
    ("factors", "is_steady"),
    [
        ([3.0] * 8, True),
        ([3.0, 2.6, 3.4, 3.1, 2.8, 3.2], True),
        ([3.0] * 3 + [1.0] * 5, False),
        ([80.0, 3.0, 30.0, 9.0, 120.0, 4.0, 25.0, 60.0], False),
    ],
    ids=["slow", "slow with noise", "slow for three steps", "recompiles one after the other"],
)
def test_steady_slowness_differs_from_slowness_that_comes_and_goes(
    factors: list[float], *, is_steady: bool
) -> None:
    watched = Watched([(0, 0)] * 4)
    for step, times in enumerate([1.0] * 20 + factors, start=1):
        watched.step(even(step, slow=[1], times=times))
    said = [(step, one.is_steady) for step, told in watched.told for one in told]
    assert said, "all of them are suspected"
    assert any(steady for _, steady in said) == is_steady
    assert not any(steady for step, steady in said if step < 24), "four steps in a row"


def test_a_rank_that_is_no_longer_steadily_slow_is_reported_so() -> None:
    watched = Watched([(0, 0)] * 4)
    for step in range(1, 28):
        watched.step(even(step, slow=[1] if 20 <= step < 26 else []))
    assert [one.is_steady for _, told in watched.told for one in told][-2:] == [True, False]


def test_a_rank_whose_reports_are_missing_does_not_keep_others_from_being_judged() -> None:
    watched = Watched([(0, 0)] * 5)
    for step in range(1, 40):
        costs = even(step, 5, slow=[1] if step >= 20 else [])
        watched.step({rank: cost for rank, cost in costs.items() if rank != 4 or step < 15})
    assert {one.guilty.ranks for _, told in watched.told for one in told} == {(1,)}


def test_what_is_remembered_does_not_grow() -> None:
    watched = Watched([(0, 0)] * 4)
    sizes = []
    for step in range(1, 400):
        watched.step(even(step))
        sizes.append(_size(vars(watched.live)))
    assert sizes[-1] == sizes[100]


def _size(thing: object) -> int:
    if isinstance(thing, dict):
        return sum(map(_size, thing.values())) + len(thing)
    if isinstance(thing, (list, tuple)) or hasattr(thing, "maxlen"):
        return sum(map(_size, thing)) + len(thing)  # type: ignore[arg-type, call-overload]
    return _size(vars(thing)) if hasattr(thing, "__dict__") else 1


class Held:
    """Two ranks that wait in each step for a while, and the third for which they wait."""

    def __init__(self) -> None:
        self.live = Live([(0, 0)] * 3, 0)
        self.at_s = 0.0
        self.rows: list[WorkerReport] = []

    def wait(self, step: int, for_s: float, **known: object) -> list[Suspicion]:
        """Let rank 2 come after ``for_s``; return whom the run suspected meanwhile."""
        found: list[Suspicion] = []
        waited_s = 0.0
        while waited_s < for_s:
            waited_s = min(waited_s + 1.0, for_s)
            self.at_s += 1.0
            waits = group("world", range(3), step, waiting_s=waited_s)
            away = replace(calm("w2", 2), step=step, groups=(group("world", range(3), step - 1),))
            self.rows = [replace(calm(f"w{r}", r), step=step, groups=(waits,)) for r in (0, 1)]
            self.rows.append(replace(away, **known))  # type: ignore[arg-type]
            for rank, row in enumerate(self.rows):
                self.live.take(rank, row, f"node{rank}", self.at_s)
            self.live.look(self.at_s)
            found += self.live.suspicions
        return found


#: Called, and not reached by the device.
BEHIND = replace(group("world", range(3), 0), num_ahead=2)


@pytest.mark.parametrize(
    ("known", "kind", "says"),
    [
        ({}, FaultKind.ABSENT, "phase forward"),
        (
            {"digest": Digest(span="data", span_s=3.0)},
            FaultKind.SLOW_DATA,
            "waited for data for 3.0 s",
        ),
        (
            {"digest": Digest(span="backward", span_s=3.0)},
            FaultKind.ABSENT,
            "in backward for 3.0 s",
        ),
        ({"beat_age_s": 2.5}, FaultKind.INTERPRETER_HELD, "held the interpreter's lock for 2.5 s"),
        ({"groups": (BEHIND,)}, FaultKind.DEVICE_STUCK, "a device that is 2 calls behind in world"),
        (
            {"groups": (BEHIND,), "beat_age_s": 2.5, "os_state": "R"},
            FaultKind.ABSENT,
            "phase forward",
        ),
        ({"os_state": "T"}, FaultKind.FROZEN, "is stopped by a signal"),
        ({"os_state": "t"}, FaultKind.FROZEN, "is stopped by a debugger"),
        ({"os_state": "Z"}, FaultKind.DEAD, "no living process"),
    ],
)
def test_a_rank_that_delays_the_others_is_suspected_after_three_seconds(
    known: dict[str, object], kind: FaultKind, says: str
) -> None:
    held = Held()
    for step in range(1, 6):
        assert held.wait(step, 0.5) == []
    assert held.wait(6, 2.9, **known) == []
    one = held.wait(7, 3.0, **known)[0]
    assert (one.kind, one.guilty, one.worker) == (kind, Guilty.of([2], (), ["node2"]), "w2")
    assert one.since_s == held.at_s - 3.0
    assert " all_reduce number 7 of world, in which ranks 0, 1 wait" in one.evidence
    assert says in one.evidence


def test_the_usual_wait_counts_and_not_the_length_of_a_step() -> None:
    """In steps of a minute an absent rank is suspected after 3 s; after usual waits of 20 s not."""
    held = Held()
    for step in range(1, 10):
        held.wait(step, 1.0)
        held.at_s += 60.0
    assert held.wait(10, 4.0)

    held = Held()
    for step in range(1, 5):
        held.wait(step, 20.0)
    assert held.wait(5, 40.0) == [], "it has always come so late"
    assert held.wait(6, 61.0)


def test_one_pause_does_not_make_pauses_usual() -> None:
    held = Held()
    for step in range(1, 10):
        assert held.wait(step, 20.0 if step == 5 else 0.2) == [] or step == 5
    assert held.wait(10, 4.0)[0].since_s == held.at_s - 4.0, "not since the pause"


def test_no_rank_is_suspected_in_the_first_step_which_compiles() -> None:
    held = Held()
    assert held.live.suspicions == ()
    rows = [
        replace(calm(f"w{r}", r), step_s=0.0, groups=(group("world", range(3), 1, waiting_s=50.0),))
        for r in range(2)
    ]
    for rank, row in enumerate(rows):
        held.live.take(rank, row, "n", 1.0)
    held.live.look(1.0)
    assert held.live.suspicions == ()


def test_a_rank_that_called_other_things_is_suspected_though_nothing_hangs() -> None:
    """Members of a group that have made as many calls have the same hash of them."""
    live = Live([(0, 0)] * 4, 0)

    def look(step: int, histories: Mapping[int, int]) -> tuple[Suspicion, ...]:
        for rank in range(4):
            called = replace(group("world", (0, 1, 2, 3), 10 * step), history=histories[rank])
            late = replace(called, entered_seq=called.entered_seq - 1, history=histories[rank] - 1)
            row = replace(calm(f"w{rank}", rank), groups=(late if rank == 3 else called,))
            live.take(rank, row, f"node{rank}", 2.0 * step)
        live.look(2.0 * step)
        return live.suspicions

    assert look(1, {0: 7, 1: 7, 2: 7, 3: 8}) == (), "another number of calls proves nothing"
    (one,) = look(2, {0: 8, 1: 9, 2: 9, 3: 9})
    assert (one.kind, one.guilty.ranks) == (FaultKind.DESYNC, (0,))
    assert "Among the first 20 calls in world, rank 0 and ranks 1, 2 made different ones" in (
        one.evidence
    )
    assert look(3, {0: 1, 1: 1, 2: 1, 3: 1}) == (one,)


@pytest.mark.parametrize("kind", HEALTHY)
def test_no_healthy_history_convicts_a_rank(kind: str) -> None:
    """Some of each kind; ``python -m tests.support.slow_histories 100000 0`` runs many."""
    for seed in range(12):
        assert convicted(history(kind, seed), seed) is None, seed


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_a_slow_rank_is_convicted_whether_samples_are_long_or_not(power: float) -> None:
    """Tokens explain what they cost all ranks, and no more."""
    draw = Random(0)

    def works(rank: int, step: int) -> tuple[float, float, float, int]:
        size = draw.lognormvariate(0.0, 0.3)
        times = 1.5 if rank == 1 and step >= 20 else 1.0
        return times * size**power, 0.0, 0.001, round(4096 * size)

    step, evidence = convicted(History(ParallelLayout(dp_shard=4), 1, 2.0, works), 0) or (0, "")
    assert 20 < step <= 45, step
    assert evidence.startswith("Rank 1 (w1 on node node1) computes 1.")
