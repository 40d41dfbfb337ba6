"""Names of torch that this room uses and torch does not promise. Checked on 2.11, 2.13 to 2.15."""

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_iter

__all__ = ["NO_BACKWARD", "call_behind_backward", "current_backward", "tree_iter"]

#: The id if no backward pass is under way in this thread.
NO_BACKWARD = -1


def current_backward() -> int:
    """Return the id of the backward call that this thread is in; ``NO_BACKWARD`` if in none."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001  torch has no public name for it


def call_behind_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward call of this thread has ended, as FSDP2 does."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
