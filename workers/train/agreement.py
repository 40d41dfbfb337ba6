"""What all ranks of an attempt have to agree on before they go on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workers.collectives import collectives

__all__ = ["all_agree", "on_host"]


def on_host(numbers: Tensor) -> list[float]:
    """Return what a collective left in ``numbers``.

    Raises:
        AbortedError: The collective ran on a device and was ended by force.
    """
    found: list[float] = numbers.tolist()
    # On the host the wait itself has raised; whoever got through has what all others have.
    if numbers.is_cuda:
        collectives.check()
    return found


def all_agree(agreed: bool, device: torch.device) -> bool:  # noqa: FBT001  what it is about
    """Return whether every rank says so. Every rank calls it; blocks for the slowest."""
    vote = torch.tensor([int(agreed)], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(on_host(vote)[0])
