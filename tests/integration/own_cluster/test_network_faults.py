"""Real faults of a network, between machines made of namespaces; judged by what the run wrote."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config import load
from tests.support import train_paced
from tests.support.history import check_lost_steps, read_history
from tests.support.network_cluster import NetworkCluster, why_not
from tests.support.network_runs import NetworkRun, digest_alone

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]


@pytest.fixture
def machines() -> Iterator[NetworkCluster]:
    """Four nodes, and a head that takes jobs."""
    # Behind whatever else runs here Ray's processes would take long to start.
    urgent = {"RAY_worker_niceness": "0"}
    with NetworkCluster(4, has_dashboard=True, environment=urgent) as cluster:
        yield cluster


def test_a_job_changes_no_bit_through_a_cut_pair_and_a_silent_node(
    machines: NetworkCluster, tmp_path: Path
) -> None:
    """No connection is closed: all that anyone sees of either is that nothing comes.

    The driver of ``ray job submit`` finds the cluster that it runs on by itself.
    """
    steps = f"train.steps={train_paced.STEPS}"
    run = NetworkRun(machines, tmp_path / "rough", steps, as_job=True)
    line = run.settle()
    one, other = run.ranks()[1:3]

    machines.cut(one, other)
    pair = run.outcome(time.time(), line["attempt"])
    machines.mend(one, other)
    line = run.lines()[-1]
    silent = run.ranks()[-1]
    machines.partition(silent)
    node = run.outcome(time.time(), line["attempt"])
    summary = run.finish()

    assert set(pair.named) <= {one, other}
    assert set(node.named) <= {silent}
    assert summary["outcome"] == "completed", summary
    faults = [each for each in summary["incidents"] if each["kind"] != "growth"]
    assert len(faults) >= 2
    for incident in faults:
        check_lost_steps(str(run.directory), incident)
    assert summary["weights_digest"] == digest_alone(tmp_path, train_paced.STEPS)
    config = load(str(tmp_path / "rough/config.yaml"), [])
    read_history(str(run.directory)).check_exactly_once(config)
    assert run.driver.wait(60) == 0, run.said()
    assert "mine.yaml cannot be read" in run.said()
    assert "leaves out files that .gitignore names" in run.said()
