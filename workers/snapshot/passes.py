"""Where a step is: told at every block of the model, in forward and in backward passes.

Source: the hooks that release buckets in REFT's hierarchical snapshots (arXiv 2310.12670).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from workers.snapshot.cuda import is_recording_graph

__all__ = ["on_passes"]


def on_passes(blocks: Iterable[nn.Module], passed: Callable[[], None]) -> Callable[[], None]:
    """Have ``passed`` called behind every forward pass of a block, and before its backward one.

    Only where gradients are wanted: a step counts its passes by that, and an evaluation is none.
    Never while a CUDA graph is recorded: it is run later, without calls.

    Args:
        blocks: Of a model.
        passed: Called by whichever thread runs the pass.

    Returns:
        Ends that.
    """

    def tell() -> None:
        if not is_recording_graph():
            passed()

    # A compiled block would be cut up there, and compiled again for each thing that tells.
    @torch.compiler.disable
    def forward(_block: nn.Module, _arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tell()
        for one in tree_iter(output):
            if isinstance(one, Tensor) and one.requires_grad:
                # A hook of the module would put a function of its own around what it returns.
                one.register_hook(lambda _gradient: tell())
                return

    handles = [block.register_forward_hook(forward) for block in blocks]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
