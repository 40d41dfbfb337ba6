"""The disk of the run directory is full: a controller that cannot write its journal gives way."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from orchestrator.config import demo_config
from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster, connect_ray

pytestmark = pytest.mark.timeout(900)

ACT_S_MAX = 240.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    import ray

    hosted = HostedCluster(num_nodes=1, cpus_per_node=2)
    connect_ray(hosted.address)
    settings = ["train.steps=100000", "workers.max=2", "cluster.local_nodes=1"]
    yield Launched(demo_config(str(tmp_path / "run"), settings), hosted)
    ray.shutdown()
    hosted.shutdown()


def test_the_next_controller_is_in_charge_once_there_is_room(run: Launched) -> None:
    """One whose loop has ended would be taken for a controller for ever, and nothing mended."""
    before = wait_for(
        run, lambda s: s["phase"] == "training" and s["step"] >= 3, timeout_s=ACT_S_MAX
    )
    assert before is not None
    full = run.controller_pid()
    # Every write to a file fails as on a full disk; the next process has no such limit.
    resource.prlimit(full, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def is_mended(status: dict[str, Any]) -> bool:
        try:
            is_next = run.controller_pid() != full
        except RayError:
            return False
        return is_next and status["phase"] == "training" and status["step"] > before["step"]

    after = wait_for(run, is_mended, timeout_s=ACT_S_MAX)
    assert after is not None
    assert after["attempt"] == before["attempt"]
    run.stop("all is seen")
    summary = run.follow(lambda _: None)
    assert (summary["outcome"], summary["lost_steps"]) == ("stopped", 0)
