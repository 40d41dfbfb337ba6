"""A node with a keeper's memory, and a rank that takes its snapshots there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.simulated_device import SimulatedDevice
from tests.support.snapshot_rank import Node, Rank
from workers.snapshot import SnapshotMemory


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice | None]:
    """Return the device that the rank copies from, of a seed; none unless parametrized."""
    made = SimulatedDevice(request.param) if hasattr(request, "param") else None
    yield made
    if made is not None:
        made.end()


@pytest.fixture
def rank(node: Node, simulated: SimulatedDevice | None) -> Iterator[Rank]:
    made = Rank(SnapshotMemory(node.directory, "w0001"), stream=simulated)
    yield made
    assert made.writer.close()


@pytest.fixture
def group() -> Iterator[None]:
    """End a process group that a test makes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
