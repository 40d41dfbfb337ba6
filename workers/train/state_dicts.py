"""Raise errors where a script takes this worker's part of the weights for the whole.

FSDP gives each worker a part. If only some workers call ``state_dict``, as under ``if rank == 0``,
it also drops gathered weights there, and the next pass of the other workers waits forever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workers import collectives
from workers.errors import ApartError, TaskError

_ADVICE: Final = (
    'session.save("best") on all workers writes the whole weights to one file (`everstep export` '
    "the newest step); every step is saved by itself"
)
#: Wrappers that a script for a fixed number of processes puts around its model, and their
#: constructors.
_WRAPPERS: Final[Mapping[Any, Any]] = {
    one: one.__init__ for one in (DistributedDataParallel, FullyShardedDataParallel)
}
#: Methods that convert a tensor to a number.
_NUMBERS: Final = ("item", "tolist", "__float__", "__int__", "__bool__")
#: Models of sessions.
_guarded: WeakSet[nn.Module] = WeakSet()


def guard_parts(model: nn.Module) -> None:
    """Make parts of weights raise an error where a script takes them for the whole.

    ``state_dict`` of the model and of its modules raises if only some workers call it. Pickling a
    part raises, and so does converting a partial sum to a number. torch's wrappers that reduce
    gradients themselves raise when they wrap the model.
    """
    _guarded.add(model)
    vars(model)["__deepcopy__"] = _refuse_copy
    for wrapper, made in _WRAPPERS.items():
        wrapper.__init__ = _refusing(made)
    if not collectives.places().are_several:
        return
    for module in model.modules():
        module.register_state_dict_pre_hook(_require_all)
    # Parameters, their copies by `detach` or `cpu`, and the values of any `state_dict` all have
    # this class, and no hook sees all of them.
    setattr(DTensor, "__reduce_ex__", _refuse_pickling)  # noqa: B010  mypy takes no assignment
    for name in _NUMBERS:
        setattr(DTensor, name, _whole_number(getattr(Tensor, name)))


def _refuse_copy(_memo: Any) -> NoReturn:
    raise TaskError(
        "a copy of the model would have only this worker's parts, besides the saved ones. For "
        "an average of the weights (torch's AveragedModel) call session.average(decay=0.999) after "
        "session.optimizer; for a second model have build return an nn.ModuleDict of both"
    )


def guard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make parts of an optimizer's state raise in the same way; they are plain tensors."""
    if collectives.places().are_several:
        optimizer.register_state_dict_pre_hook(lambda _: _meet("optimizer.state_dict()"))
        optimizer.register_state_dict_post_hook(_refuse_state)


def _refusing(made: Callable[..., None]) -> Callable[..., None]:
    def make(wrapper: nn.Module, module: nn.Module, *arguments: Any, **named: Any) -> None:
        if module in _guarded:
            line = collectives.script_line(sys._getframe(1))  # noqa: SLF001
            raise TaskError(
                f"{line} puts {type(wrapper).__name__} around the model: leave it out. The session "
                "shards the weights and reduces the gradients, whatever the number of workers"
            )
        made(wrapper, module, *arguments, **named)

    return make


def _require_all(_module: nn.Module, prefix: str, _keep_vars: bool) -> None:  # noqa: FBT001
    # With a prefix, an enclosing module's ``state_dict`` makes this call.
    if not prefix:
        _meet("model.state_dict()")


def _meet(what: str) -> None:
    apart = collectives.places().meet(what)
    if apart:
        line = collectives.script_line(sys._getframe(2))  # noqa: SLF001
        raise ApartError(
            f"{what} was called at {line} by some workers only: "
            f"{collectives.described(apart)}. It would hold this worker's part of each weight, and "
            f"the others would wait forever. {_ADVICE}; else call it on all workers"
        )


def _refuse_pickling(part: DTensor, protocol: Any) -> Any:
    local = part._local_tensor  # noqa: SLF001  no public way without a collective
    if local.shape == part.shape:
        return Tensor.__reduce_ex__(part, protocol)
    raise _pickled(f"part {list(local.shape)} of a weight {list(part.shape)}")


def _pickled(what: str) -> TaskError:
    line = collectives.script_line(sys._getframe(2))  # noqa: SLF001
    return TaskError(
        f"{line} pickles this worker's {what}: a file of it, as torch.save writes it, is not a "
        f"model. {_ADVICE}"
    )


def _whole_number(made: Callable[..., Any]) -> Callable[..., Any]:
    def number(part: DTensor, *arguments: Any) -> Any:
        if any(placement.is_partial() for placement in part.placements):
            line = collectives.script_line(sys._getframe(1))  # noqa: SLF001
            raise TaskError(
                f"{line} converts to a number a tensor of which each worker has computed a part, "
                "such as a norm or a sum of weights: call .full_tensor() on all workers first"
            )
        return made(part, *arguments)

    return number


def _refuse_state(_optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    for slots in state["state"].values():
        for value in slots.values():
            if isinstance(value, Tensor) and value.dim():
                value.__dict__["__reduce_ex__"] = _Refusal()


class _Refusal:
    """Refuses to pickle a tensor of an optimizer's state."""

    def __call__(self, _protocol: int) -> NoReturn:
        raise _pickled("part of an optimizer's state")

    def __deepcopy__(self, _memo: Any) -> _Refusal:
        return self
