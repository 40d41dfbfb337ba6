"""A node with a keeper's memory, and a rank that takes its snapshots there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.snapshot_rank import Node, Rank
from workers.snapshot import SnapshotMemory


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rank(node: Node) -> Iterator[Rank]:
    made = Rank(SnapshotMemory(node.directory, "w0001"))
    yield made
    assert made.writer.close()
