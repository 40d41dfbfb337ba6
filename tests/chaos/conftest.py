"""A cluster of two simulated nodes, for the tests of a module that need no other one."""

from collections.abc import Iterator

import pytest

from orchestrator.shell import HostedCluster, connect_ray


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[HostedCluster]:
    """The cluster; a module says by ``CPUS_PER_NODE`` how many workers a node has, if not two."""
    import ray

    cpus_per_node = getattr(request.module, "CPUS_PER_NODE", 2)
    hosted = HostedCluster(num_nodes=2, cpus_per_node=cpus_per_node)
    connect_ray(hosted.address)
    yield hosted
    ray.shutdown()
    hosted.shutdown()
