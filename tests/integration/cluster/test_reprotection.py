"""A second loss right after the run has recovered from the first: protection is new, too."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.driver.faults import kill_node_of, member, wait_for
from orchestrator.driver.launch import Launched
from tests.support.history import check_lost_steps, read_history
from tests.support.snapshots import eventually

pytestmark = pytest.mark.timeout(900)

ACT_S_MAX = 240.0
#: Limits of ``workers.train.boundary.protection_wait``.
WAIT_S_MAX = 1.0


def _num_lines(directory: str, attempt: int) -> int:
    return sum(line["attempt"] == attempt for line in read_history(directory).lines)


@pytest.mark.chaos
def test_node_lost_right_after_a_growth_costs_one_step(
    nodes: Any, begin_endless: Callable[..., Launched]
) -> None:
    """Earlier versions are only on the old node, and a new one at first only on its own node."""
    run = begin_endless(workers__standby_per_node=0, checkpoint__every_steps="auto")
    config = run.config
    started = wait_for(
        run, lambda s: s["phase"] == "training" and s["step"] >= 5, timeout_s=ACT_S_MAX
    )
    assert started is not None
    kill_node_of(run, 3)
    nodes.add_node()
    grown = wait_for(
        run,
        lambda s: (
            s["attempt"] > started["attempt"] + 1
            and s["phase"] in {"forming", "training"}
            and sum(worker["rank"] >= 0 for worker in s["workers"]) == 4
        ),
        timeout_s=ACT_S_MAX,
    )
    assert grown is not None
    assert grown["cadence"]["snapshot_steps"] == 1
    attempt, directory = grown["attempt"], config.run.directory
    assert eventually(lambda: _num_lines(directory, attempt) >= 2, within_s=ACT_S_MAX)
    newcomer = member(grown, 3)["node"]
    assert newcomer != member(started, 3)["node"]
    kill_node_of(run, 3)
    assert wait_for(
        run,
        lambda s: s["phase"] == "training" and s["attempt"] > attempt,
        timeout_s=ACT_S_MAX,
    )
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    losses = [each for each in summary["incidents"] if each["kind"] == "node_loss"]
    assert len(losses) == 2, summary["incidents"]
    history = read_history(directory)
    # Ranks wait so long for their first copies; a machine that needs more is promised nothing.
    waits_s = [line["waited_s"] for line in history.lines if line["attempt"] == attempt]
    if max(waits_s) < WAIT_S_MAX:
        check_lost_steps(directory, losses[1])
    history.check_exactly_once(config, summary["steps"])


@pytest.mark.chaos
def test_on_a_slow_link_snapshots_are_fewer_and_outlive_a_node_still(
    begin_endless: Callable[..., Launched],
) -> None:
    """To refuse copies for it would leave the run to what is in storage, which here is nothing."""
    run = begin_endless(
        workers__standby_per_node=0, snapshot__send_mib_per_s=1, checkpoint__every_steps=50_000
    )
    seen = wait_for(
        run,
        lambda s: (
            (s["cadence"]["snapshot_taken_steps"] or 0) > s["cadence"]["snapshot_steps"]
            and s["redundancy"]["node_losses_survived"] == 1
        ),
        timeout_s=ACT_S_MAX,
    )
    assert seen is not None
    assert "partner copy, for the loss of 1 of 2 nodes" in seen["redundancy"]["reason"]
    kill_node_of(run, 3)
    assert wait_for(
        run,
        lambda s: s["phase"] == "training" and s["attempt"] > seen["attempt"],
        timeout_s=ACT_S_MAX,
    )
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    (loss,) = [each for each in summary["incidents"] if each["kind"] == "node_loss"]
    assert loss["sources"], "it began at step 0"
    assert set(loss["sources"]) <= {"local memory", "peer memory"}
