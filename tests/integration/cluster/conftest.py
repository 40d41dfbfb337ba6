"""One cluster of simulated nodes, for all tests that need Ray."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from orchestrator.errors import CapacityError
from tests.integration.cluster.left_runs import runs_ended

#: A run that takes longer to stop is ended by force.
STOP_S_MAX = 60.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two simulated nodes with room for two workers each, and this process connected.

    Both have the same GPU.
    """
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    from orchestrator.shell import HostedCluster, connect_ray

    # Ray takes our word for the GPU; a worker that is given it finds none, and trains on the CPU.
    hosted = HostedCluster(num_nodes=2, cpus_per_node=2, gpus=("0",))
    connect_ray(hosted.address)
    yield hosted
    ray.shutdown()
    hosted.shutdown()


@pytest.fixture
def nodes(cluster: Any, tmp_path: Path) -> Iterator[Any]:
    """The cluster with its two nodes and no run, whatever the test before did to them."""
    while len(cluster.nodes()) < 2:
        cluster.add_node()
    with runs_ended(tmp_path):
        yield cluster
    while len(cluster.nodes()) > 2:
        cluster.kill_node(cluster.nodes()[-1])


@pytest.fixture
def begin_endless(
    nodes: Any, make_config: Callable[..., RunConfig]
) -> Iterator[Callable[..., Launched]]:
    """Begins a run that is stopped once all is seen: not before, however slow the machine is."""
    begun: list[Launched] = []

    def begin(**overrides: object) -> Launched:
        chosen = {"train__steps": 100_000, **overrides}
        begun.append(Launched(make_config(**chosen), nodes))
        return begun[-1]

    yield begin
    for run in begun:
        run.stop("the test is over")
        with contextlib.suppress(CapacityError):
            wait_for(run, lambda _: False, timeout_s=STOP_S_MAX)
