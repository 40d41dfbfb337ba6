"""An unattended job on a cluster whose machines are cut off, taken and lost.

Machines are namespaces. The test does the work of an operator's tools: a machine that was taken or
lost is booted again.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load
from tests.support.history import read_history
from tests.support.network_cluster import HEAD, NetworkCluster, why_not
from tests.support.network_runs import NetworkRun, digest_alone

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]

_say = logging.getLogger(__name__)

STEPS, PACE_S = 260, 0.5
#: The provider takes a machine so long after it said so.
NOTICE_S = 30.0


@pytest.fixture
def cluster() -> Iterator[NetworkCluster]:
    """Four nodes with room for a worker of each of two runs, and a head that takes jobs."""
    # Behind whatever else runs here Ray's processes would take minutes to start.
    urgent = {"RAY_worker_niceness": "0"}
    with NetworkCluster(4, cpus_per_node=2, has_dashboard=True, environment=urgent) as made:
        yield made


def _training(run: NetworkRun) -> tuple[dict[str, Any], int]:
    """Return the last line and the machine of the last rank, once three or more train together."""
    line = run.settle(workers=3, or_more=True)
    return line, run.ranks()[-1]


def _cut_off(run: NetworkRun) -> None:
    line, machine = _training(run)
    run.cluster.partition(machine)
    outcome = run.outcome(time.time(), line["attempt"])
    run.cluster.heal(machine)
    _say.info("cut off: %s", outcome)
    assert set(outcome.named) <= {machine}


def _take(run: NetworkRun) -> None:
    line, machine = _training(run)
    told_s = time.time()
    run.announce(machine, told_s + NOTICE_S)
    outcome = run.outcome(told_s, line["attempt"])
    time.sleep(max(0.0, told_s + NOTICE_S - time.time()))
    run.cluster.kill(machine)
    # The next machine at its address is another one.
    run.announce(machine, None)
    run.cluster.boot(machine)
    _say.info("taken: %s", outcome)
    assert (outcome.named, outcome.lost_steps) == ((), 0)


def _power_off(run: NetworkRun) -> None:
    line, machine = _training(run)
    run.cluster.power_off(machine)
    outcome = run.outcome(time.time(), line["attempt"])
    run.cluster.boot(machine)
    _say.info("off: %s", outcome)
    assert set(outcome.named) <= {machine}


def test_a_job_ends_as_an_undisturbed_run_whatever_its_cluster_does(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """A partition, a notice and a power-off, and each node returns; another run is beside it."""
    settings = f"train.steps={STEPS}"
    run = NetworkRun(
        cluster, tmp_path / "rough", settings, pace_s=PACE_S, has_metadata=True, as_job=True
    )
    beside = NetworkRun(cluster, tmp_path / "beside", settings, pace_s=PACE_S)
    for hurt in (_cut_off, _take, _power_off):
        hurt(run)

    alone = digest_alone(tmp_path, STEPS)
    for each in (run, beside):
        summary = each.finish()
        _say.info("%s", {key: value for key, value in summary.items() if key != "incidents"})
        assert summary["outcome"] == "completed", summary
        assert summary["weights_digest"] == alone
        config = load(str(each.directory / "config.yaml"), [])
        read_history(str(each.directory)).check_exactly_once(config)
    kinds = [incident["kind"] for incident in run.summary()["incidents"]]
    assert "growth" in kinds, "a node that returned trained again"
    assert run.driver.wait(60) == 0, run.said()
    assert "SUCCEEDED" in cluster.run(HEAD, ["ray", "job", "list", "--address", cluster.jobs])
