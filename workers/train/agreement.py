"""What all ranks of an attempt have to agree on before they go on."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["all_agree"]


def all_agree(agreed: bool, device: torch.device) -> bool:  # noqa: FBT001  what it is about
    """Return whether every rank says so. Every rank calls it; blocks for the slowest."""
    vote = torch.tensor([int(agreed)], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())
