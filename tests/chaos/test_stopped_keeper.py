"""A keeper is stopped by a signal: Ray and the trainers go on as if nothing were missing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import demo_config
from orchestrator.driver.faults import member, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster, connect_ray

pytestmark = pytest.mark.timeout(900)

ACT_S_MAX = 240.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    import ray

    hosted = HostedCluster(num_nodes=2, cpus_per_node=2)
    connect_ray(hosted.address)
    yield Launched(demo_config(str(tmp_path / "run"), ["train.steps=100000"]), hosted)
    ray.shutdown()
    hosted.shutdown()


def _protected(status: dict[str, Any]) -> bool:
    survived: int = status["redundancy"]["node_losses_survived"]
    return status["phase"] == "training" and survived == 1


def _keeper_pid(status: dict[str, Any], node: str) -> int:
    return int(next(view["keeper_pid"] or 0 for view in status["nodes"] if view["node"] == node))


def test_training_goes_on_and_is_protected_again(run: Launched) -> None:
    """Otherwise copying and storing would stop, until the next fault takes everything."""
    before = wait_for(run, _protected, timeout_s=ACT_S_MAX)
    assert before is not None
    node = str(member(before, 0)["node"])
    stopped = _keeper_pid(before, node)
    os.kill(stopped, signal.SIGSTOP)

    def is_back(status: dict[str, Any]) -> bool:
        return _protected(status) and _keeper_pid(status, node) not in {0, stopped}

    after = wait_for(run, is_back, timeout_s=ACT_S_MAX)
    assert after is not None
    assert after["attempt"] == before["attempt"]
    assert after["redundancy"]["step"] > before["redundancy"]["step"]
    run.stop("all is seen")
    summary = run.follow(lambda _: None)
    assert (summary["outcome"], summary["lost_steps"]) == ("stopped", 0)
