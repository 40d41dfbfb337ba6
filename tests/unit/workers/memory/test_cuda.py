"""Calls of the CUDA driver, against one that keeps books; copies need a device."""

from pathlib import Path

import pytest
import torch

from tests.support.snapshot_rank import Node
from workers.errors import ArenaError
from workers.memory import NUM_BUFFERS
from workers.memory.cuda import register, unregister


class _Driver:
    """Takes so many ranges as pinned, and none twice, as the real one."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, _num_bytes: int, _flags: int) -> int:  # noqa: N802
        if address in self.pinned:
            return 712
        if len(self.pinned) == self.num_free:
            return 2
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.pinned.remove(address)
        return 0


def test_memory_that_was_pinned_in_part_can_be_pinned_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short for a moment; the worker would never take a snapshot again."""
    driver, node = _Driver(num_free=1), Node(tmp_path)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    arena = node.table.reserve("w0001.1", body_bytes=8192)
    with pytest.raises(ArenaError, match="error 2; raise the limit of locked memory"):
        register(arena)
    assert driver.pinned == set()

    driver.num_free = NUM_BUFFERS
    register(arena)
    assert len(driver.pinned) == NUM_BUFFERS
    unregister(arena)
    assert driver.pinned == set()
    node.table.drop("w0001.1")
    node.close()
