"""Report the beginning and end of every block's forward and backward pass in a step.

Source: the hooks that release buckets in REFT's hierarchical snapshots (arXiv 2310.12670).
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workers.collectives import is_recording_graph
from workers.snapshot.torch_names import (
    NO_BACKWARD,
    call_behind_backward,
    current_backward,
    tree_iter,
)


class Told(Protocol):
    """A function that the thread of the pass calls."""

    def __call__(self, *, ends: bool) -> None:
        """Note that a pass begins or ends."""


def on_passes(blocks: Iterable[nn.Module], told: Told) -> Callable[[], None]:
    """Call ``told`` when passes of blocks begin and end; return a function that stops this.

    The calls come before and after each forward pass of a block, before each backward pass, and
    after a whole backward call: one block's backward pass begins where another's ends.

    There are calls only while gradients are enabled, because the caller counts a step's calls.
    There are none while a CUDA graph is captured, because it is replayed without calls.
    """
    hooks = _Hooks(told)
    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(hooks.before))
        handles.append(block.register_forward_hook(hooks.behind))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _Hooks:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._last = NO_BACKWARD

    # Otherwise torch would split a compiled block here, and compile it again for each ``told``.
    @torch.compiler.disable
    def before(self, _block: nn.Module, _arguments: Any) -> None:
        """Report that a forward pass begins."""
        if torch.is_grad_enabled():
            self._tell(ends=False)

    @torch.compiler.disable
    def behind(self, _block: nn.Module, _arguments: Any, output: Any) -> None:
        """Report that a forward pass ends; set up the report that its backward pass begins."""
        if not torch.is_grad_enabled():
            return
        # A forward pass within a backward pass (recomputation) continues the latter.
        if current_backward() == NO_BACKWARD:
            self._tell(ends=True)
        for one in tree_iter(output):
            if isinstance(one, Tensor) and one.requires_grad:
                # A hook of the module would wrap the module's result in a function.
                one.register_hook(self._before_backward)
                return

    def _before_backward(self, _gradient: Tensor) -> None:
        self._tell(ends=False)
        if self._last != current_backward():
            self._last = current_backward()
            call_behind_backward(self._behind_backward)

    def _behind_backward(self) -> None:
        self._tell(ends=True)

    def _tell(self, *, ends: bool) -> None:
        if not is_recording_graph():
            self._told(ends=ends)
