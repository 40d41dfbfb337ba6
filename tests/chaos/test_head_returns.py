"""The head is lost and comes back, with what it knew kept in a Redis: training never stops.

Machines are namespaces. The command that began the run is on a node that stays.
"""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_cluster import HEAD, NetworkCluster, why_no_redis
from tests.support.network_runs import NetworkRun, digest_alone
from workers.telemetry.lease import VARIABLE

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis() or "it can be made"),
]

#: The head is away for so long; Ray, and so the trainers, would wait that long for it. With Ray's
#: own 60 s they would stop after 45 s.
AWAY_S, WAIT_S = 60.0, 600
DRIVER, PACE_S = 1, 0.5


@pytest.fixture
def cluster() -> Iterator[NetworkCluster]:
    """Two nodes, a head and a Redis."""
    environment = {
        VARIABLE: str(WAIT_S),
        # A process that waits for a vanished machine retries less often the longer it is away.
        "RAY_grpc_client_keepalive_timeout_ms": "10000",
        # Behind whatever else runs here Ray's processes would take minutes to start.
        "RAY_worker_niceness": "0",
    }
    with NetworkCluster(2, has_redis=True, environment=environment) as made:
        yield made


def test_training_does_not_notice_a_head_that_is_away_for_a_minute(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """Its controller is another process on another boot, and must end what it has not begun."""
    steps = 200
    run = NetworkRun(
        cluster, tmp_path / "rough", f"train.steps={steps}", "workers.max=2",
        pace_s=PACE_S / 2, on=DRIVER,
    )  # fmt: skip
    before = run.settle(workers=2)
    cluster.kill(HEAD)
    time.sleep(AWAY_S)
    said = json.loads(cluster.run(DRIVER, ["everstep", "status", str(run.directory), "--json"]))
    cluster.boot(HEAD)
    summary = run.finish()

    assert said["controller"] == "down"
    assert said["step"] > before["step"] + AWAY_S / PACE_S / 2
    lines = run.lines()
    since = lines[before["step"] - 1 :]
    gaps_s = [b["wall_time"] - a["wall_time"] for a, b in itertools.pairwise(since)]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), "none was redone"
    assert {line["attempt"] for line in lines} == {before["attempt"]}
    # Usually less than two (bench_network, head-back); what is formed again takes 3 s or more.
    assert max(gaps_s) < 5 * before["step_s"]
    assert (summary["outcome"], summary["lost_steps"]) == ("completed", 0)
    assert summary["weights_digest"] == digest_alone(tmp_path, steps)
    assert run.driver.wait(60) == 0
    assert "training continues without it" in run.said()
    assert "the controller answers again" in run.said()


def test_a_run_is_stopped_while_its_head_is_away(cluster: NetworkCluster, tmp_path: Path) -> None:
    """The order waits for the head; so does the command that follows the run."""
    run = NetworkRun(cluster, tmp_path / "run", "workers.max=2", pace_s=PACE_S / 2, on=DRIVER)
    run.settle(workers=2)
    log = tmp_path / "stop.log"
    cluster.kill(HEAD)
    stopping = cluster.start(DRIVER, ["everstep", "stop", str(run.directory), "--wait"], log)
    run.wait("a stop that waits", lambda: "to come back" in log.read_text() or None)
    cluster.boot(HEAD)
    summary = run.finish()

    assert (summary["outcome"], summary["lost_steps"]) == ("stopped", 0)
    assert stopping.wait(60) == 0
    assert run.driver.wait(60) == 0
    assert summary["steps"] == run.lines()[-1]["step"]
