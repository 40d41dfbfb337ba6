"""One cluster of simulated nodes, for all tests that need Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two simulated nodes with room for two workers each, and this process connected."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    from orchestrator.shell.connect import connect
    from orchestrator.shell.local_cluster import HostedCluster

    hosted = HostedCluster(num_nodes=2, cpus_per_node=2)
    connect(hosted.address)
    yield hosted
    ray.shutdown()
    hosted.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[Any]:
    """The cluster with its two nodes, whatever the test before did to them."""
    while len(cluster.nodes()) < 2:
        cluster.add_node()
    yield cluster
    while len(cluster.nodes()) > 2:
        cluster.kill_node(cluster.nodes()[-1])
