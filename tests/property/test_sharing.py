"""Runs that share a cluster, each deciding alone by what is a little old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from orchestrator.policies import Share, Sharing, SharingRules
from orchestrator.policies.sharing import decide

POLL_S = 2.0
#: Every example takes milliseconds, and there are few runs to leave out.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
#: Workers not taken are offered again before a test ends.
RULES = SharingRules(deaf_s=60.0)


@dataclass
class Run:
    """One run: ``num_held`` of ``num_max`` workers, and what it has made of its share."""

    name: str
    priority: int
    num_min: int
    num_max: int
    unit: int
    is_over: bool = False
    num_held: int = 0
    lacks_since_s: float = 0.0
    sharing: Sharing = field(default_factory=Sharing)
    has_begun: bool = False

    @property
    def num_asked(self) -> int:
        limit = self.sharing.limit
        most = self.num_max if limit < 0 else min(limit, self.num_max)
        return max(most - self.num_held, 0)

    @property
    def num_spare(self) -> int:
        return self.num_held - (self.num_min if self.has_begun else 0)

    def could_begin(self, others: Sequence[Run]) -> bool:
        spare = sum(run.num_spare // run.unit * run.unit for run in others)
        return self.num_held + spare >= self.num_min

    def share(self, now_s: float) -> Share:
        is_late = self.sharing.limit >= 0 or now_s - self.lacks_since_s >= RULES.lack_s
        return Share(
            run=self.name,
            priority=self.priority,
            num_min=self.num_min,
            has_begun=self.has_begun,
            num_held=self.num_held,
            num_lacking=max(self.num_max - self.num_held, 0) if is_late else 0,
            unit=self.unit,
            needs=(("CPU", 1.0),),
        )


@dataclass
class Cluster:
    """Room for ``num_buffers`` workers, which whoever asks first gets."""

    runs: list[Run]
    num_buffers: int
    rng: Random
    now_s: float = 0.0
    num_given: int = 0

    def free(self) -> int:
        return self.num_buffers - sum(run.num_held for run in self.living())

    def living(self) -> list[Run]:
        return [run for run in self.runs if not run.is_over]

    def place(self) -> None:
        """Ray grants requests in any order."""
        asked = [run for run in self.living() for _ in range(run.num_asked)]
        self.rng.shuffle(asked)
        for run in asked[: self.free()]:
            run.num_held += 1
            run.lacks_since_s = self.now_s
        for run in self.living():
            run.has_begun |= run.num_held >= run.num_min

    def turn(self) -> None:
        """Let each run look at the others as they were, and give what it decides to."""
        seen = [run.share(self.now_s) for run in self.living()]
        for run in self.living():
            others = [share for share in seen if share.run != run.name]
            own = run.share(self.now_s)
            run.sharing = decide(run.sharing, own, others, RULES, now_s=self.now_s)
        for run in self.living():
            if 0 <= run.sharing.limit < run.num_held and self.rng.random() < 0.7:
                # At a step boundary, which may come a little later.
                self.num_given += run.num_held - run.sharing.limit
                run.num_held = run.sharing.limit
                run.lacks_since_s = self.now_s
                assert not run.has_begun or run.num_held >= run.num_min, run
        self.place()
        self.now_s += POLL_S


@st.composite
def clusters(
    draw: st.DrawFn, *, priorities: st.SearchStrategy[int], units: Sequence[int]
) -> Cluster:
    runs = []
    for number in range(draw(st.integers(2, 4))):
        unit = draw(st.sampled_from(units))
        num_max = unit * draw(st.integers(1, 6 // unit))
        num_min = draw(st.integers(1, num_max))
        runs.append(Run(f"r{number}", draw(priorities), num_min, num_max, unit))
    rng = Random(draw(st.integers(0, 1000)))
    return Cluster(runs, draw(st.integers(1, 10)), rng)


@settings(max_examples=40, deadline=None, phases=NO_SHRINKING)
@given(clusters(priorities=st.integers(0, 2), units=(1, 1, 2)))
def test_runs_settle_and_no_lower_one_keeps_what_a_higher_one_lacks(cluster: Cluster) -> None:
    """Each decides alone: two may give for the same lack, or take from each other for ever."""
    for run in cluster.runs[1:]:
        run.is_over = True
    for run in cluster.runs:
        run.is_over = False
        for _ in range(200):
            cluster.turn()
    before = [run.num_held for run in cluster.runs]
    cluster.num_given = 0
    for _ in range(60):
        cluster.turn()

    assert cluster.num_given == 0, "they give and take for ever"
    assert [run.num_held for run in cluster.runs] == before
    for taker in cluster.runs:
        lower = [run for run in cluster.runs if run.priority < taker.priority]
        if taker.num_held < taker.num_max and taker.has_begun:
            assert all(run.num_spare < run.unit for run in lower), cluster.runs
        assert taker.has_begun or not taker.could_begin(lower), cluster.runs


@settings(max_examples=30, deadline=None, phases=NO_SHRINKING)
@given(clusters(priorities=st.just(0), units=(1,)))
def test_equals_share_evenly(cluster: Cluster) -> None:
    """Else whoever came first keeps all, and a second run waits for the end of the first."""
    for _ in range(300):
        cluster.turn()

    for taker in cluster.runs:
        for giver in cluster.runs:
            if taker.has_begun and taker.num_held < taker.num_max and giver.num_spare:
                assert giver.num_held - taker.num_held <= 1, (giver, taker)
        others = [run for run in cluster.runs if run is not taker and run.has_begun]
        assert taker.has_begun or not taker.could_begin(others), cluster.runs


@settings(max_examples=30, deadline=None, phases=NO_SHRINKING)
@given(clusters(priorities=st.integers(0, 2), units=(1,)))
def test_what_is_left_when_a_run_ends_is_taken(cluster: Cluster) -> None:
    """A limit that outlives its reason would keep workers idle that no other run wants."""
    for _ in range(100):
        cluster.turn()
    cluster.runs[0].is_over = True
    for _ in range(60):
        cluster.turn()

    wanted = sum(run.num_max for run in cluster.living())
    assert cluster.free() == max(cluster.num_buffers - wanted, 0), cluster.runs


def test_a_run_that_does_not_take_what_it_is_given_gets_nothing_more() -> None:
    """It waits for something else, such as another kind of GPU, and would idle all others."""
    own = Share(run="a", num_min=1, num_held=4, needs=(("CPU", 1.0),))
    other = Share(run="b", priority=1, num_held=1, num_lacking=2, needs=(("CPU", 1.0),))
    gave = decide(Sharing(), own, [other], RULES, now_s=0.0)
    assert (gave.limit, gave.runs) == (2, ("b",))

    left = replace(own, num_held=2)
    assert decide(gave, left, [other], RULES, now_s=9.0) == gave
    spurned = decide(gave, left, [other], RULES, now_s=10.0)
    assert (spurned.limit, spurned.deaf) == (-1, (("b", 70.0),))
    assert decide(spurned, own, [other], RULES, now_s=69.0).limit == -1
    assert decide(spurned, own, [other], RULES, now_s=71.0).limit == 2


def test_nothing_is_given_for_a_worker_that_would_not_fit() -> None:
    """Places of CPUs are no room for a GPU; of small places it takes several."""
    own = Share(run="a", num_min=1, num_held=5, needs=(("CPU", 2.0),))
    other = Share(run="b", priority=1, num_lacking=1)
    needs = {"GPU": 1.0, "CPU": 1.0}

    def left(**wanted: float) -> int:
        asks = replace(other, needs=tuple(wanted.items()))
        return decide(Sharing(), own, [asks], RULES, now_s=0.0).limit

    assert left(**needs) == -1
    assert left(CPU=1.0) == left(CPU=2.0) == 4
    assert left(CPU=3.0) == 3
