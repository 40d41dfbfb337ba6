"""Save a script's state besides the model: schedulers, averages of the loss, a curriculum.

Anything with ``state_dict`` and ``load_state_dict`` can be registered. Its state is saved with
every version as small JSON values, the same on every worker.
"""

import json
import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from workers.errors import TaskError

#: Limit for all registered objects together: they are written after every step, as text.
_BYTES_MAX: Final = 256 << 10
#: Keys of the dictionaries that represent values that JSON lacks.
_TAGS: Final = ({"tensor", "shape", "base64"}, {"array", "shape", "base64"}, {"base64"},
                {"items"}, {"tuple"}, {"float"}, {"as", "of"})  # fmt: skip


@runtime_checkable
class Stateful(Protocol):
    """An object that can be registered."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: numbers, strings and small tensors, in dictionaries and lists."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set the state to a value that ``state_dict`` returned."""


@dataclass(slots=True)
class Registered:
    """The registered objects of an attempt."""

    optimizers: Sequence[torch.optim.Optimizer]  #: The optimizers, whose groups schedulers change.
    _objects: dict[str, Stateful] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._objects)

    def schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a registered object sets the learning rate of ``optimizer``."""
        return any(
            _is_scheduler(one) and one.optimizer is optimizer for one in self._objects.values()
        )

    @property
    def scaler(self) -> GradScaler | None:
        """Return the object that scales losses, so that small float16 gradients do not vanish."""
        found = (one for one in self._objects.values() if isinstance(one, GradScaler))
        return next((one for one in found if one.is_enabled()), None)

    def add(self, name: str, stateful: Stateful, saved: Mapping[str, Any] | None) -> None:
        """Register an object, and load its state if there is one.

        ``saved`` is the object's value in the saved ``values``; None at the start of a run. Raise
        ``TaskError`` if the name is taken, or the object's state cannot be saved or loaded.
        """
        if name in self._objects:
            raise TaskError(f"session.register: {name!r} is registered already; choose another")
        if not isinstance(stateful, Stateful):
            raise TaskError(
                f"session.register: {name} ({type(stateful).__name__}) needs state_dict() and "
                "load_state_dict()",
                name=name,
            )
        if _is_scheduler(stateful) and not any(
            stateful.optimizer is one for one in self.optimizers
        ):
            raise TaskError(
                f"session.register: {name} changes another optimizer than the one that "
                "session.optimizer returned; make the scheduler with that one",
                name=name,
            )
        encode(stateful.state_dict(), f"session.register: {name}")
        if saved is not None:
            try:
                stateful.load_state_dict(decode(saved["state"]))
            except Exception as error:
                raise TaskError(
                    f"session.register: {name} ({type(stateful).__name__}) does not take its saved "
                    f"state: {type(error).__name__}: {error}",
                    name=name,
                ) from error
            groups = stateful.optimizer.param_groups if _is_scheduler(stateful) else ()
            for group, values in zip(groups, saved["groups"], strict=False):
                # A scheduler continues from the values that it had set, because most do not set
                # them again.
                group.update(decode(values))
        self._objects[name] = stateful

    def values(self) -> dict[str, Any]:
        """Return the state of all objects as JSON values, or raise ``TaskError``."""
        found = {name: self._value(name, one) for name, one in self._objects.items()}
        size_bytes = len(json.dumps(found))
        if size_bytes > _BYTES_MAX:
            largest = max(found, key=lambda name: len(json.dumps(found[name])))
            raise TaskError(
                f"session.register: the registered state has {size_bytes >> 10} KiB, at most "
                f"{_BYTES_MAX >> 10} can be saved after every step; the largest is {largest}. "
                "Keep large tensors in the model",
                name=largest,
            )
        return found

    def states(self) -> dict[str, Any]:
        """Return each object's ``state_dict()``, by name."""
        return {name: one.state_dict() for name, one in self._objects.items()}

    def _value(self, name: str, one: Stateful) -> dict[str, Any]:
        where = f"session.register: {name}"
        groups: list[Any] = []
        if _is_scheduler(one):
            groups = [
                encode({key: value for key, value in group.items() if _is_plain(key, value)}, where)
                for group in one.optimizer.param_groups
            ]
        return {"state": encode(one.state_dict(), where), "groups": groups}


def _is_scheduler(one: Any) -> TypeGuard[LRScheduler]:
    """Return whether an object sets learning rates: a scheduler of torch, or a similar one."""
    alike = ("optimizer", "step", "get_last_lr")
    return isinstance(one, LRScheduler) or all(hasattr(one, name) for name in alike)


def _is_plain(key: str, value: Any) -> bool:
    """Return whether a value of an optimizer's group is a number or several numbers."""
    if key == "params" or value is None or isinstance(value, str | bool):
        return False
    parts = value if isinstance(value, list | tuple) else [value]
    return all(
        part.dim() == 0 if isinstance(part, Tensor) else isinstance(part, int | float)
        for part in parts
    )


def encode(value: Any, path: str) -> Any:
    """Return a value as JSON that ``decode`` converts back.

    Raise ``TaskError`` if it holds something other than numbers, strings, tensors and collections
    of them.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"base64": b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {"as": "number", "of": _encode_array(np.asarray(value), path)}
    if isinstance(value, Tensor) or kind is np.ndarray:
        return _encode_array(value, path)
    # torch's schedulers keep a Counter, modules an OrderedDict.
    if kind in (dict, OrderedDict, Counter):
        items = [(key, encode(one, f"{path}.{key}")) for key, one in value.items()]
        if kind is Counter:
            return {"as": "counter", "of": encode(dict(value), path)}
        if all(type(key) is str for key, _ in items) and value.keys() not in _TAGS:
            return dict(items)
        return {"items": [[encode(key, path), one] for key, one in items]}
    if kind in (list, tuple):
        encoded = [encode(one, f"{path}[{index}]") for index, one in enumerate(value)]
        return encoded if kind is list else {"tuple": encoded}
    raise _refusal(path, f"is a {kind.__name__}")


def _encode_array(value: Tensor | NDArray[Any], path: str) -> dict[str, Any]:
    if isinstance(value, DTensor):
        raise TaskError(
            f"{path} is a sharded tensor, which depends on the number of workers; keep it in the "
            "model",
            path=path,
        )
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            raise _refusal(path, f"is a {type(value).__name__}")
        tag, kind = "tensor", str(value.dtype).removeprefix("torch.")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif value.dtype.kind in "OV":
        raise _refusal(path, "is an array of objects or of structures")
    else:
        tag, kind = "array", value.dtype.str
        data = np.ascontiguousarray(value).tobytes()
    return {tag: kind, "shape": list(value.shape), "base64": b64encode(data).decode()}


def _refusal(path: str, what: str) -> TaskError:
    return TaskError(
        f"{path} {what}; state_dict() may hold numbers, texts, tensors, arrays, "
        "and lists, tuples and dictionaries of them; another class would come back as one of these",
        path=path,
    )


def decode(value: Any) -> Any:
    """Return the value that ``encode`` made JSON from."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"float": text, **rest} if not rest:
            return float(text)
        case {"tuple": items, **rest} if not rest:
            return tuple(decode(one) for one in items)
        case {"as": kind, "of": held, **rest} if not rest:
            return Counter(decode(held)) if kind == "counter" else decode(held)[()]
        case {"items": items, **rest} if not rest:
            return {decode(key): decode(one) for key, one in items}
        case {"base64": data, **rest} if not rest:
            return b64decode(data)
        case {"array": kind, "shape": shape, "base64": data}:
            return np.frombuffer(b64decode(data), dtype=np.dtype(kind)).reshape(shape).copy()
        case {"tensor": kind, "shape": shape, "base64": data}:
            held = torch.empty(shape, dtype=getattr(torch, kind))
            raw = np.frombuffer(b64decode(data), dtype=np.uint8)
            held.reshape(-1).view(torch.uint8).numpy()[:] = raw
            return held
    return {key: decode(one) for key, one in value.items()}
