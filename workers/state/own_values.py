"""Save an optimizer's values outside the state of parameters, such as ScheduleFree's step count.

Such values are in its groups. An optimizer that is not torch's own may also keep them in
attributes, and in ``state`` under keys that are not parameters. Each version saves numbers,
strings, 0-d tensors and collections of these if they have changed since the optimizer was made.
Values that a script passes to an optimizer's constructor remain the script's choice.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor, optim

from workers.errors import StateError
from workers.state.registered import decode, encode

#: Values that are not the optimizer's own: the session or a scheduler sets the rates.
_SET_BY_OTHERS: Final = frozenset({"params", "lr", "initial_lr"})
#: Attributes of every optimizer; attributes for hooks begin with ``_optimizer_``.
_OF_TORCH: Final = frozenset({"defaults", "param_groups", "state"})
#: Stands for a value that is not plain.
_OTHER: Final = object()


class OwnValues:
    """The values of optimizers outside the state of parameters.

    ``unknown`` are the optimizers whose kinds are not torch's own.
    """

    def __init__(
        self, every: Sequence[optim.Optimizer], unknown: Sequence[optim.Optimizer]
    ) -> None:
        groups = [group for one in every for group in one.param_groups]
        self._parameters = [one for group in groups for one in group["params"]]
        # Lists are treated as dictionaries with indices as keys.
        self._holders: list[Any] = [*map(vars, unknown), *groups, *(one.state for one in unknown)]
        seen = set(map(id, self._holders))
        for holder in tuple(self._holders):
            self._holders += _mixed((value for _, value in own_items(holder)), seen)
        self._made = [
            {key: _noted(value) for key, value in own_items(one)} for one in self._holders
        ]

    def changed(self) -> list[Any]:
        """Return the values that changed since the optimizers were made, as JSON."""
        found: list[dict[Any, Any]] = []
        for holder, made in zip(self._holders, self._made, strict=True):
            found.append({})
            for key, value in own_items(holder):
                if is_plain(value) and not (key in made and _is_as_noted(value, made[key])):
                    found[-1][key] = saved_form(value)
        return [encode(one, "the optimizer's values") for one in found] if any(found) else []

    def set_changed(self, values: Sequence[Any]) -> None:
        """Set values that ``changed`` returned."""
        for holder, changed in zip(self._holders, values, strict=False):
            for key, value in decode(changed).items():
                self._put(holder, key, value)

    def _put(self, holder: Any, key: Any, value: Any) -> None:
        """Set a value, in place if one exists, because other objects may refer to it."""
        held = holder[key] if isinstance(holder, list) else holder.get(key)
        if isinstance(held, Tensor):
            held.fill_(value)
        elif isinstance(held, dict) and isinstance(value, dict):
            for gone in held.keys() - value.keys():
                del held[gone]
            for name, one in value.items():
                self._put(held, name, one)
        elif isinstance(held, list | deque) and isinstance(value, list):
            held.clear()
            held.extend(value)
        elif isinstance(value, Tensor) and self._parameters:
            holder[key] = value.to(self._parameters[0].device)
        else:
            holder[key] = value


def refusal(name: str, what: str) -> StateError:
    """Return the error for an optimizer with a value that no version can hold."""
    return StateError(
        f"optimizer {name} keeps {what} outside the state of parameters: a run that resumes "
        'would begin without it. Make it in step() in self.state[parameter]["..."], as a '
        "number or a tensor of the parameter's shape, which is saved with the weight",
        optimizer=name,
    )


def own_items(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield keys and values of a dictionary or list, without those that are known to be torch's."""
    if isinstance(holder, list):
        yield from enumerate(holder)
        return
    for key, value in holder.items():
        if isinstance(key, str):
            if key in _SET_BY_OTHERS or key in _OF_TORCH or key.startswith("_optimizer_"):
                continue
        elif isinstance(key, Tensor):
            continue
        yield key, value


def is_plain(value: Any) -> bool:
    """Return whether a value can be saved: a number, a string, or a collection of these."""
    if isinstance(value, list | tuple | deque):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, int | float | str | np.generic)


def saved_form(value: Any) -> Any:
    """Return a plain value as one of the classes that ``encode`` knows."""
    if isinstance(value, dict):
        return {key: saved_form(one) for key, one in value.items()}
    if isinstance(value, list | deque):
        return list(map(saved_form, value))
    return tuple(map(saved_form, value)) if isinstance(value, tuple) else value


def _mixed(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield the dictionaries and lists in ``values`` that hold both plain and other values."""
    for value in values:
        if isinstance(value, dict | list) and id(value) not in seen and not is_plain(value):
            seen.add(id(value))
            inside = [one for _, one in own_items(value)]
            if any(map(is_plain, inside)):
                yield value
            yield from _mixed(inside, seen)


def _noted(value: Any) -> Any:
    """Return a value that shows whether a value has changed, without reading from a device."""
    if not is_plain(value):
        return _OTHER
    if isinstance(value, Tensor):
        return value, value._version  # noqa: SLF001
    if isinstance(value, dict):
        return {key: _noted(one) for key, one in value.items()}
    return list(map(_noted, value)) if isinstance(value, list | tuple | deque) else value


def _is_as_noted(value: Any, noted: Any) -> bool:
    if isinstance(value, Tensor):
        held, version = noted if isinstance(noted, tuple) else (None, 0)
        return held is value and version == value._version  # noqa: SLF001
    if isinstance(value, dict):
        return (
            isinstance(noted, dict)
            and value.keys() == noted.keys()
            and all(_is_as_noted(one, noted[key]) for key, one in value.items())
        )
    if isinstance(value, list | tuple | deque):
        return (
            isinstance(noted, list)
            and len(value) == len(noted)
            and all(map(_is_as_noted, value, noted))
        )
    return value is noted or bool(value == noted)
