"""A worker that gets slow on a real cluster: it is suspected, and left where that pays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import demo_config
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster, connect_ray
from tests.support import train_slowed

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[HostedCluster]:
    """As many nodes as the test says, with one worker each."""
    import ray

    hosted = HostedCluster(num_nodes=request.param, cpus_per_node=1)
    connect_ray(hosted.address)
    yield hosted
    ray.shutdown()
    hosted.shutdown()


def train(cluster: HostedCluster, folder: Path, steps: int, **plan: Any) -> dict[str, Any]:
    """Train with steps of half a second, while the second rank but one does what is planned."""
    (folder / "plan.json").write_text(json.dumps({"rank": 2, "from": 20, **plan}))
    config = demo_config(
        str(folder / "run"),
        [
            f"run.script={train_slowed.__file__}",
            f"run.arguments={json.dumps([str(folder), '0.5'])}",
            f"train.steps={steps}",
            "train.global_batch=16",
            "train.micro_batch=2",
            "train.schedule=constant",
            "workers.max=4",
            "workers.min=2",
        ],
    )
    summary = Launched(config, cluster).follow(lambda _: None)
    assert summary["outcome"] == "completed", summary["reason"]
    return summary


@pytest.mark.parametrize("cluster", [4, 5], indirect=True, ids=["none is left", "one is left"])
def test_a_run_leaves_a_worker_that_takes_three_times_as_long(
    cluster: HostedCluster, tmp_path: Path
) -> None:
    """Three are faster than four that wait for one; another node is better still."""
    summary = train(cluster, tmp_path, 100, what="slow", by=3.0)

    first = summary["suspected"][0]["evidence"]
    assert first.startswith("Rank 2 ")
    assert "computes" in first
    assert summary["suspicions"].keys() <= {"slow_compute"}
    assert summary["lost_steps"] == 0
    (slow,) = (one for one in summary["incidents"] if one["kind"] == "slow")
    assert slow["guilty"][0] in first
    assert {one["kind"] for one in summary["incidents"]} <= {"slow", "growth"}


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_pause_is_suspected_and_no_worker_is_left(cluster: HostedCluster, tmp_path: Path) -> None:
    """It costs 20 s once; from outside, a recompile looks like an evaluation."""
    summary = train(cluster, tmp_path, 40, what="pause", by=20.0)

    assert summary["suspicions"].get("absent") == 1
    assert summary["incidents"] == []
    assert summary["lost_steps"] == 0
