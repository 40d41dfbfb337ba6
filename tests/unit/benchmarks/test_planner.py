"""The planner on the spot market, beside an oracle that knows what comes and pays, too."""

import pytest

from tests.benchmarks.bench_planner import HOURS, MEASURED, MODELS, cluster_of, hour, measure
from tests.support.layout_replay import (
    Replay,
    Stretch,
    by_degrees,
    by_planner,
    greedy,
    oracle,
    stretches,
    unlearned,
)
from tests.support.spot_traces import Change, Costs

#: As if Ray restarted the workers.
RESTART = Costs(loss=60.0, growth=15.0, join=8.0)


@pytest.mark.parametrize("name", HOURS)
@pytest.mark.parametrize("model", MODELS)
def test_the_planner_makes_nearly_as_many_samples_as_an_oracle(model: str, name: str) -> None:
    """Eleven hours have 77 losses, and two of the single hours have a third of the nodes."""
    found = measure(model, name, MEASURED)
    assert float(found["planner"]) >= 0.95
    if name == "all":
        assert float(found["planner"]) >= float(found["unlearned"]) >= float(found["degrees"])


@pytest.mark.parametrize("costs", [MEASURED, RESTART], ids=["measured", "restart"])
@pytest.mark.parametrize("name", HOURS)
@pytest.mark.parametrize("model", MODELS)
def test_no_policy_is_better_than_the_oracle(model: str, name: str, costs: Costs) -> None:
    """Else a policy pays less than it should, or the oracle overlooks something."""
    cluster, trace = cluster_of(model, costs), hour(name, costs.join)
    most = oracle(cluster, trace, any_stages=False)
    made = [Replay(cluster, policy).run(trace) for policy in (by_planner, unlearned, by_degrees)]
    assert max(*made, greedy(cluster, trace)) <= most * (1 + 1e-9)
    assert most <= oracle(cluster, trace, any_stages=True) * (1 + 1e-9)


def test_newcomers_count_once_their_workers_are_ready() -> None:
    changes = [Change(0.0, 4), Change(10.0, 2), Change(20.0, 3)]
    assert stretches(changes, 60.0, join_s=8.0) == [
        Stretch(0.0, 10.0, 4, is_loss=False),
        Stretch(10.0, 28.0, 2, is_loss=True),
        Stretch(28.0, 60.0, 3, is_loss=False),
    ]


def test_a_run_without_changes_pays_for_its_start_alone() -> None:
    """It makes its time over that of a step."""
    cluster = cluster_of("1.5b", MEASURED)
    trace = stretches([Change(0.0, 32)], 1000.0, join_s=8.0)
    trained_s = 1000.0 - cluster.pause_s(cluster.wish, is_loss=False)
    steps = trained_s / cluster.forecast(cluster.wish).step_s
    assert Replay(cluster, by_planner).run(trace) == pytest.approx(steps)
    assert greedy(cluster, trace) == pytest.approx(steps)


def test_nodes_that_hold_the_model_in_no_layout_make_no_step() -> None:
    """Each layout is tried and refused once; then the run waits."""
    cluster = cluster_of("6.7b", MEASURED)
    assert cluster.layouts(4, any_stages=False) == ()
    assert Replay(cluster, by_planner).run([Stretch(0.0, 100.0, 4, is_loss=False)]) == 0.0
