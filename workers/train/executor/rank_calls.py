"""Record a model's calls about ranks in the first step of an attempt.

A forward pass that uses the number of ranks, or what other ranks hold, gives different results when
their number changes. It would also wait for ranks that have fewer micro-batches.
"""

import sys
import traceback
from typing import Any, Final

from torch import nn

from workers.errors import TaskError
from workers.train.executor.torch_names import ABOUT_RANKS, distributed_c10d

_REAL: Final = getattr(distributed_c10d, ABOUT_RANKS, None)
_WITHIN: Final = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
#: FSDP, DTensor and tensor parallelism of ``transformers`` may call these functions. Dynamo calls
#: them when it compiles a forward pass that does.
_OWN: Final = ("torch.", "workers.", "transformers.distributed.")
_DYNAMO: Final = "torch._dynamo.variables."
#: A module declares this if its result is the same for any number of ranks.
_DECLARED: Final = "depends_on_ranks"


class RankCalls:
    """Calls of ``torch.distributed`` by forward passes, from ``begin`` to ``refuse``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[nn.Module, str] = {}
        self._is_done = False

    def begin(self) -> None:
        """Begin, unless a step was already watched."""
        if not self._is_done and _REAL is not None:
            setattr(distributed_c10d, ABOUT_RANKS, self._asked)

    def end(self) -> None:
        """End for good."""
        self._is_done = True
        if _REAL is not None:
            setattr(distributed_c10d, ABOUT_RANKS, _REAL)

    def refuse(self) -> None:
        """End, and raise ``TaskError`` if the result of a module may depend on the ranks."""
        if self._is_done:
            return
        self.end()
        names = {module: name for name, module in self._model.named_modules()}
        found = [
            f"{names.get(module) or 'the model'} ({type(module).__name__}) calls {call}"
            for module, call in self._found.items()
        ]
        if found:
            raise TaskError(
                f"the forward pass depends on the workers, whose number changes: {'; '.join(found)}"
                ". Compute from the samples alone, or move these calls out of forward(). "
                f"If the result is the same for any number of ranks, write {_DECLARED} = False in "
                "the module's class",
            )

    def _asked(self, *args: Any) -> Any:
        """Stand in for the function that every function about ranks calls."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]  # noqa: SLF001
        names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
        at = next((n for n, name in enumerate(names) if name not in _WITHIN), len(names))
        if at < len(names) and (names[at].startswith(_DYNAMO) or not names[at].startswith(_OWN)):
            modules = [
                frame.f_locals["self"]
                for frame in frames[at:]
                if frame.f_code is nn.Module._call_impl.__code__  # noqa: SLF001
            ]
            if modules and all(getattr(one, _DECLARED, True) for one in modules):
                call = next(n for n in reversed(range(at)) if names[n] == _WITHIN[0])
                told = f"torch.distributed.{frames[call].f_code.co_name}"
                line = f" in {frames[at].f_code.co_filename}:{frames[at].f_lineno}"
                told += "" if names[at].startswith(_DYNAMO) else line
                self._found.setdefault(modules[0], told)
        assert _REAL is not None, "it was replaced"
        return _REAL(*args)
