"""The run learns how long steps take in each layout, and moves to a faster one where that pays."""

from dataclasses import replace

import pytest

from orchestrator.core import Bounds, RunRules
from orchestrator.policies import GrowthRules, LayoutRules
from tests.support.obedient_cluster import Cluster
from ucp_core.layout import ParallelLayout

RULES = RunRules(
    run="r",
    min_workers=1,
    max_workers=5,
    total_steps=1000,
    layout=LayoutRules(pp=4),
    bounds=Bounds(grace_s=5.0),
)
WISH, PAIR = ParallelLayout(pp=4), ParallelLayout(pp=2)


def step_s(layout: ParallelLayout) -> float:
    """Four stages take long."""
    return 0.5 if layout.pp == 4 else 0.4 / layout.dp_shard


def test_the_first_step_of_an_attempt_says_nothing_of_the_layout() -> None:
    """It compiles and fills caches; growth would be weighed by it for minutes."""
    took_s = iter([9.0, 0.5])
    cluster = Cluster(RULES, step_s=lambda _: next(took_s))
    cluster.start(4)
    assert not cluster.state.steps

    took_s = iter([0.5, 0.5])
    cluster.train(1)
    assert cluster.state.steps == ((WISH, 0.5),)


def test_noise_changes_nothing_that_is_known_of_a_layout() -> None:
    """Step times are part of every choice, and choices are kept."""
    cluster = Cluster(RULES, step_s=step_s)
    cluster.start(4)
    cluster.train(3)
    known = cluster.state.steps
    cluster.step_s = lambda _: 0.52
    cluster.train(50)
    assert cluster.state.steps is known

    cluster.step_s = lambda _: 1.0
    cluster.train(50)
    assert dict(cluster.state.steps)[WISH] == pytest.approx(1.0, rel=0.06)


def test_each_layout_has_a_step_time_of_its_own_and_keeps_it() -> None:
    """The mean of the layout before made a growth look like less or more than it was."""
    cluster = Cluster(RULES, step_s=step_s)
    cluster.start(4)
    cluster.train(2)
    cluster.lose("n1")
    cluster.train(2)

    assert cluster.layouts == ["pp=4", "pp=2"]
    assert cluster.state.steps == ((WISH, 0.5), (PAIR, 0.4))
    assert cluster.state.step_s == 0.4


@pytest.mark.parametrize(("pause_s", "moves"), [(1.0, True), (1000.0, False)])
def test_members_move_to_the_layout_that_was_seen_to_be_faster_if_that_pays(
    pause_s: float, *, moves: bool
) -> None:
    """Two pairs do in 0.2 s what four stages do in 0.5 s; the fifth worker suits neither."""
    cluster = Cluster(RULES, step_s=step_s)
    cluster.start(2)
    cluster.train(60)
    cluster.add(3, 4, 5)
    cluster.tick(10.0)
    before = ["pp=2", "dp_shard=3", "pp=4"]
    assert cluster.layouts == before, "the wish was not seen before"

    cluster.rules = replace(RULES, growth=GrowthRules(pause_guess_s=pause_s))
    cluster.train(11)

    if not moves:
        assert cluster.layouts == before
        return
    assert cluster.layouts == [*before, "pp=2 x dp_shard=2"]
    assert cluster.incidents[-1].incident == "move"
    assert cluster.incidents[-1].evidence == (
        "a step of pp=4 takes 0.5 s, and of pp=2 x dp_shard=2 about 0.2 s"
    )
    assert cluster.started[-1].other_layouts[0] == ("pp=4", "is slower; a step took 0.5 s")
    cluster.train(100)
    assert len(cluster.layouts) == len(before) + 1, "it stays there"


def test_all_workers_in_the_layout_that_was_asked_for_are_never_moved() -> None:
    """Measured or not, the user has asked for it."""
    cluster = Cluster(replace(RULES, max_workers=4), step_s=step_s)
    cluster.start(2)
    cluster.train(20)
    cluster.add(3, 4)
    cluster.tick(10.0)
    cluster.train(200)

    assert cluster.layouts == ["pp=2", "dp_shard=3", "pp=4"]
