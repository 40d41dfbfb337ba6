"""A cluster of simulated nodes, for the tests of a module that need no other one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.shell import HostedCluster, connect_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[HostedCluster]:
    import ray

    hosted = HostedCluster(num_nodes=2, cpus_per_node=2)
    connect_ray(hosted.address)
    yield hosted
    ray.shutdown()
    hosted.shutdown()
