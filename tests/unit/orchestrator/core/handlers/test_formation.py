"""The workers that train next: a layout needs more of the nodes than numbers."""

from dataclasses import replace

import pytest

from orchestrator.core import Bounds, RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import LayoutRules
from tests.support.run_events import begun_on

PINNED = RunRules(
    run="r",
    min_workers=2,
    max_workers=4,
    total_steps=10,
    layout=LayoutRules(tp=2, fixed=("tp",)),
    bounds=Bounds(capacity_s=100.0),
)


def _answer(rules: RunRules, places: list[str], at_s: float = 5.0) -> list[act.Action]:
    """Return what follows, up to ``at_s``, once there is a worker at each place."""
    events = begun_on(places, granted_s=1.0, ready_s=2.0)
    state, found = RunState(), list[act.Action]()
    for event in (*events, ev.Ticked(at_s=at_s)):
        state, actions = step(state, event, rules=rules)
        found += actions
    return found


def test_members_of_a_tensor_parallel_group_are_on_one_node() -> None:
    """The worker that is alone on its node waits, whichever came first."""
    actions = _answer(PINNED, ["a", "b", "b"], at_s=60.0)

    (started,) = [each for each in actions if isinstance(each, act.StartAttempt)]
    assert [node for _, node, _ in started.members] == ["b", "b"]
    assert started.layout.tp == 2


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (["a"], "no capacity: 1 of at least 2 workers could be had for 100 s"),
        (
            ["a", "b"],
            (
                "no capacity: 2 workers could be had for 100 s, but not so that parallel.tp=2 fits "
                "their nodes"
            ),
        ),
    ],
)
def test_a_run_that_waits_in_vain_says_what_it_lacked(places: list[str], why: str) -> None:
    """Enough workers on the wrong nodes are another thing to mend than too few."""
    (over,) = [
        each for each in _answer(PINNED, places, at_s=101.0) if isinstance(each, act.FinishRun)
    ]

    assert over.reason == why


def test_what_is_not_pinned_gives_way() -> None:
    """Two workers on two nodes train on, without tensor parallelism."""
    free = replace(PINNED, layout=LayoutRules(tp=2))

    (started,) = [
        each for each in _answer(free, ["a", "b"], at_s=60.0) if isinstance(each, act.StartAttempt)
    ]

    assert str(started.layout) == "dp_shard=2"
    assert started.other_layouts == (("tp=2", "needs 1 x 2 workers, each on one node"),)
