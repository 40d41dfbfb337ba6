"""Lets the replicas of a process group load a checkpoint together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["GroupTransport"]


class GroupTransport:
    """The ranks of a process group, for ``ucp_core.native.replicas.load_together``.

    Args:
        group: The ranks that need the same tensors; every one of them must load.
        device: Where the group's collectives take their tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, mine: memoryview, held: Sequence[memoryview]) -> None:
        """Fill ``held[r]`` with what rank ``r`` gave as ``mine``; a lost rank raises."""
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        received = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in held]
        if self._device.type == "cpu":
            dist.all_gather(received, sent, group=self._group)
            return
        staged = torch.empty((self.size, len(mine)), dtype=torch.uint8, device=self._device)
        dist.all_gather_single(staged, sent.to(self._device), group=self._group)
        for row, buffer in zip(staged, received, strict=True):
            buffer.copy_(row)
