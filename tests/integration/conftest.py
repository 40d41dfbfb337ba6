"""What tests share that train for real: one set of simulated nodes, or bare worker processes.

Each test has a run of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig, demo_config
from tests.support.attempts import write_texts
from tests.support.trainers import Run
from workers.train.settings import DataSettings


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


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return the demo's configuration with changes, in a directory of the test's own."""

    def make(name: str = "run", **overrides: object) -> RunConfig:
        settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        return demo_config(str(tmp_path / name), settings)

    return make


@pytest.fixture
def text(tmp_path: Path) -> DataSettings:
    """Return a few files to train on."""
    return write_texts(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a run of worker processes without Ray."""
    directory = tmp_path / "run"
    directory.mkdir()
    with Run(directory) as opened:
        yield opened
