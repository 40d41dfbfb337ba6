"""Step copies of an optimizer, to allocate its state and to find the values that it changes."""

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn, optim

from workers.parallel import LocalShard
from workers.state.entries import state_of
from workers.state.own_values import is_plain, own_items, refusal, saved_form

#: Stands for a missing value.
_NOTHING: Final = object()
#: Classes of random number generators.
_RANDOM: Final = (
    torch.Generator, random.Random, np.random.Generator, np.random.RandomState,
)  # fmt: skip
#: Classes with attributes that no step of an optimizer changes.
_NO_STATE: Final = (nn.Module, type, ModuleType, FunctionType, MethodType)
#: Classes whose objects are compared as a whole.
_WHOLES: Final = (np.ndarray, set, frozenset, bytes, bytearray)


def state_of_a_step(
    optimizer: optim.Optimizer, *, shares_weights: bool
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state that a first step makes for the trained parameters, but with zeros.

    ``optimizer`` and its weights do not change. ``shares_weights`` says that the step may use the
    weights themselves, because this kind changes none at a rate of zero.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    twin, stand_ins = _twin(optimizer, copies=() if shares_weights else parameters)
    for group in twin.param_groups:
        group["lr"] = 0.0 * group["lr"]
    _step(twin, torch.zeros_like)
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter in parameters:
        state = twin.state.get(stand_ins.get(parameter, parameter), {})
        if state:
            found[parameter] = state
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
    return found


def refuse_unsavable(
    optimizer: optim.Optimizer,
    shards: Sequence[LocalShard],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Do a step on copies of the weights; raise ``StateError`` if no version could hold the result.

    An example is a tensor outside the state of parameters.
    """
    own = [one for group in optimizer.param_groups for one in group["params"]]
    # A tensor that a step does not change is refused as well, because every tenth step may change
    # it.
    for what, name in _like_weights(optimizer, own):
        raise refusal(type(optimizer).__name__, f"{what} in {name}")
    twin, stand_ins = _twin(optimizer, copies=own)
    gradients = _step(twin, torch.ones_like)
    state_of(shards, {fqn: stand_ins.get(one, one) for fqn, one in parameters.items()}, twin)
    for parameter, copied in stand_ins.items():
        for name, value in vars(copied).items():
            if isinstance(value, Tensor) and value is not vars(parameter).get(name):
                what = f"a tensor of shape {tuple(value.shape)} in parameter.{name}"
                raise refusal(type(optimizer).__name__, what)
    # A tensor in the memory of a weight or gradient is that weight or gradient.
    memory = {_memory(one) for one in (*stand_ins.values(), *gradients)}
    seen = {id(one) for one in stand_ins.values()}
    for told, before, after in _beside_parameters(optimizer, twin):
        for what, name in _unsavable(before, after, told, memory, seen):
            raise refusal(type(optimizer).__name__, f"{what} in {name}")


def _like_weights(
    optimizer: optim.Optimizer, own: Sequence[nn.Parameter]
) -> Iterator[tuple[str, str]]:
    """Yield ``(what, name)`` of tensors of a weight's shape outside the state of parameters."""
    shapes = {one.shape for one in own if one.numel() > 1}
    memory = {_memory(one) for one in own}
    places = [("defaults.", optimizer.defaults)]
    places += [(f"param_groups[{n}].", group) for n, group in enumerate(optimizer.param_groups)]
    places += [("parameter.", vars(one)) for one in own]
    left = [(f"{place}{key}", one) for place, held in places for key, one in held.items()]
    left += [(str(key), one) for key, one in own_items(vars(optimizer))]
    seen = {id(one) for one in own} | {id(group["params"]) for group in optimizer.param_groups}
    for name, value in left:
        if id(value) in seen or is_plain(value):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.shape in shapes and _memory(value) not in memory:
                yield f"a tensor of shape {tuple(value.shape)}", name
        elif isinstance(value, FunctionType):
            inside = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            # A cell may have no value yet.
            cells = [(key, cell) for key, cell in inside if cell != CellType()]
            left += [(f"{name}: {key}", cell.cell_contents) for key, cell in cells]
        elif not isinstance(value, optim.Optimizer):
            left += [(f"{name}{key}", one) for key, _, one in _parts(None, value)]


def _twin(
    optimizer: optim.Optimizer, copies: Sequence[nn.Parameter]
) -> tuple[optim.Optimizer, dict[nn.Parameter, nn.Parameter]]:
    """Return a copy of ``optimizer`` with ``copies`` of these parameters, and the copies."""
    memo: dict[int, Any] = {
        id(one): one for group in optimizer.param_groups for one in group["params"]
    }
    made: dict[nn.Parameter, nn.Parameter] = {}
    for one in copies:
        # Copies of tensors that share memory also share memory.
        made[one] = nn.Parameter(copy.deepcopy(one.detach(), memo), one.requires_grad)
        vars(made[one]).update(vars(one))
        memo[id(one)] = made[one]
    return _copied_optimizer(optimizer, memo), made


def _copied_optimizer(optimizer: optim.Optimizer, memo: dict[int, Any]) -> optim.Optimizer:
    """Return a copy with all attributes, some of which ``copy.deepcopy`` would drop."""
    memo[id(optimizer)] = twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A script's hooks must run only for steps that count.
        vars(twin)[name] = OrderedDict() if name.startswith("_optimizer_") else _copied(value, memo)
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, optim.Optimizer):
        return memo.get(id(value)) or _copied_optimizer(value, memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001  a lock, say; classes raise what they like
        return value


def _step(optimizer: optim.Optimizer, gradient_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    trained = [
        one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    ]
    gradients = []
    for one in trained:
        gradients.append(gradient_of(one.detach()))
        one.grad = gradients[-1]
    # A scheduler may have replaced this method with one that is bound to the first optimizer.
    type(optimizer).step(optimizer)
    for one in trained:
        one.grad = None
    return gradients


def _beside_parameters(
    before: optim.Optimizer, after: optim.Optimizer
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of two optimizers outside the state of parameters, with names."""
    places = [("", vars(before), vars(after)), ("state.", before.state, after.state)]
    pairs = zip(before.param_groups, after.param_groups, strict=True)
    places += [(f"param_groups[{n}].", *pair) for n, pair in enumerate(pairs)]
    for place, mine, theirs in places:
        held = dict(own_items(mine))
        for key, value in own_items(theirs):
            yield f"{place}{key}", held.get(key, _NOTHING), value


def _unsavable(
    before: Any, after: Any, name: str, memory: set[int], seen: set[int], *, is_inside: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield ``(what, name)`` of everything that a step made or changed and that cannot be saved.

    ``is_inside`` says that the value is inside an object, of which nothing can be saved.
    """
    if after is before or id(after) in seen:
        return
    if is_plain(after):
        if is_inside and not _is_equal(before, after):
            yield "a value", name
        return
    if isinstance(after, Tensor):
        if _memory(after) not in memory and not _is_equal(before, after):
            yield f"a tensor of shape {tuple(after.shape)}", name
        return
    if isinstance(after, _RANDOM):
        yield "random numbers of its own", name
    elif isinstance(after, _WHOLES):
        if not _is_equal(before, after):
            yield f"a {type(after).__name__}", name
    else:
        seen.add(id(after))
        is_inside = is_inside or not isinstance(after, dict | list)
        for key, mine, theirs in _parts(before, after):
            yield from _unsavable(mine, theirs, f"{name}{key}", memory, seen, is_inside=is_inside)


def _parts(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values in a collection or object, each with the value of the earlier one."""
    if isinstance(after, list | tuple | deque):
        held = iter(before) if isinstance(before, list | tuple | deque) else iter(())
        for number, value in enumerate(after):
            yield f"[{number}]", next(held, _NOTHING), value
        return
    is_dict = isinstance(after, dict)
    if not is_dict and (isinstance(after, _NO_STATE) or not hasattr(after, "__dict__")):
        return
    mine, theirs = (one if is_dict else getattr(one, "__dict__", {}) for one in (before, after))
    # Values are compared by position, because keys may be parameters, which were copied.
    held = iter(mine.values() if isinstance(mine, dict) else ())
    for key, value in theirs.items():
        said = f"[{key!r}]" if isinstance(key, str | int) else "[...]"
        yield said if is_dict else f".{key}", next(held, _NOTHING), value


def _is_equal(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return (
            isinstance(before, Tensor)
            and before.shape == after.shape
            and bool(torch.equal(before, after))
        )
    if isinstance(after, np.ndarray):
        return np.array_equal(before, after) if isinstance(before, np.ndarray) else False
    return bool(saved_form(before) == saved_form(after))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
