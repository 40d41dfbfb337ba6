"""Which of torch's optimizers cannot update parameters in parts; they are known by their class.

An optimizer here is given this worker's part of every parameter. One that treats every element
alike does the same with parts as with the whole; one that looks at a matrix as a whole goes on
without a word and takes another step on every number of workers. What it keeps says nothing of
that: Muon's momentum has the shape of its parameter. Where it does say something, of whatever
class the optimizer is, ``workers.state.entries`` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ucp_core.layout import ParallelLayout
from workers.errors import StateError

__all__ = ["refuse_unfit"]

#: Of no use here however many workers there are (torch 2.13).
_NEVER: Final[Mapping[type[torch.optim.Optimizer], str]] = {
    torch.optim.Adafactor: "scales by sums over whole rows, columns and parameters, and keeps the "
    "sums, which cannot be saved in parts",
    torch.optim.LBFGS: "computes the loss several times in a step, and keeps one history for all "
    "parameters, which cannot be saved in parts",
    torch.optim.SparseAdam: "takes sparse gradients only, and between workers they are dense",
}


def refuse_unfit(optimizer: torch.optim.Optimizer, layout: ParallelLayout) -> None:
    """Raise if ``optimizer`` would update parts of parameters in another way than the whole.

    Args:
        optimizer: Over the parts of one worker.
        layout: Over how many workers the parameters are spread.

    Raises:
        StateError: It is of a class that is known not to fit, or of one derived from it.
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
