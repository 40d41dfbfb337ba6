"""Refuse those of torch's optimizers that cannot update shards; they are known by class.

An optimizer gets this worker's shard of every parameter. If it treats every element alike, shards
give the same result as whole parameters. If it uses whole matrices, its steps silently depend on
the number of workers, and its state need not show it: Muon's momentum has its parameter's shape.
``workers.state.entries`` refuses optimizers of any class whose state cannot be saved in shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ucp_core.layout import ParallelLayout
from workers.errors import StateError

__all__ = ["refuse_unfit"]

#: Refused for any number of workers (torch 2.13).
_NEVER: Final[Mapping[type[torch.optim.Optimizer], str]] = {
    torch.optim.Adafactor: "scales by sums over whole rows, columns and parameters, and keeps the "
    "sums, which cannot be saved in parts",
    torch.optim.LBFGS: "computes the loss several times in a step, and keeps one history for all "
    "parameters, which cannot be saved in parts",
    torch.optim.SparseAdam: "takes sparse gradients only, and between workers they are dense",
}


def refuse_unfit(optimizer: torch.optim.Optimizer, layout: ParallelLayout) -> None:
    """Raise if ``optimizer`` would update shards in another way than whole parameters.

    Args:
        optimizer: The optimizer over one worker's shards.
        layout: The layout of the attempt.

    Raises:
        StateError: Its class, or a base class of it, is known not to fit.
    """
    reason = next((why for kind, why in _NEVER.items() if isinstance(optimizer, kind)), None)
    advice = "use one that treats every element alike, as AdamW or SGD"
    if reason is None and isinstance(optimizer, torch.optim.Muon) and layout.dp_shard > 1:
        reason = (
            "makes the update of a whole matrix orthogonal, and here every worker has a part of "
            f"it (dp_shard={layout.dp_shard})"
        )
        advice += ", or have every worker hold the whole model: parallel.dp_replicate as large "
        advice += "as workers.max"
    if reason is not None:
        name = type(optimizer).__name__
        raise StateError(f"optimizer {name} {reason}; {advice}", optimizer=name, layout=str(layout))
