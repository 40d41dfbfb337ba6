"""``model.state_dict()`` in a script: parts of weights, which look like the whole.

FSDP gives each worker its part. Called on some workers only, as by ``if rank == 0``, it also drops
gathered weights there, and the next pass of the others waits for ever.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from workers import collectives
from workers.errors import ApartError, TaskError
from workers.parallel import fsdp_modules

_ADVICE: Final = (
    'session.save("best") on all workers writes the whole weights to one file (`everstep export` '
    "the newest step); every step is saved by itself"
)


def guard_state_dicts(model: nn.Module) -> None:
    """Have ``state_dict`` of a sharded model, and of each unit of it, refuse what would be wrong.

    It raises where not every worker calls it, and its parts raise where they are pickled.
    """
    if not collectives.places().are_several:
        return
    for module in dict.fromkeys((model, *fsdp_modules(model))):
        assert isinstance(module, nn.Module), "FSDP derives its classes from the module's"
        module.register_state_dict_pre_hook(_require_all)
        module.register_state_dict_post_hook(_refuse_pickling)


def _require_all(_module: nn.Module, prefix: str, _keep_vars: bool) -> None:  # noqa: FBT001
    if prefix:
        # Part of a larger one.
        return
    apart = collectives.places().meet("model.state_dict()")
    if apart:
        line = collectives.script_line(sys._getframe(1))  # noqa: SLF001
        raise ApartError(
            f"model.state_dict() was called at {line} by some workers only: "
            f"{collectives.described(apart)}. It would hold this worker's part of each weight, and "
            f"the others would wait for ever. {_ADVICE}; else call it on all workers"
        )


def _refuse_pickling(_module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
    if prefix:
        return
    for name, value in state.items():
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            value.__dict__["__reduce_ex__"] = _Refusal(name)


class _Refusal:
    """Stands in for how a tensor is pickled."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _protocol: int) -> NoReturn:
        raise TaskError(
            f"{self._name} is this worker's part of a weight: a file of it, as torch.save writes "
            f"it, is no model. {_ADVICE}",
            fqn=self._name,
        )

    def __deepcopy__(self, _memo: Any) -> _Refusal:
        return self
