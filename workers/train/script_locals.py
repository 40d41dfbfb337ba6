"""Tensors that a script's function holds and changes in each step, but no version saves."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers import collectives
from workers.train.executor import ShardedModel

#: The steps of a run after which it looks: a tensor that changes between all of them is reported.
_LOOKS: Final = 3
#: Tensors of a collection, such as one for each parameter.
_TENSORS_MAX: Final = 10_000


class ScriptLocals:
    """Inspect the local variables of the function that runs the loop, in a run's first steps."""

    def __init__(self) -> None:
        self._num_looks = 0
        #: A variable's value, and the tensors in it with their versions.
        self._seen: dict[str, tuple[Any, list[tuple[int, int]]]] = {}

    def look(self, sharded: ShardedModel) -> list[str]:
        """Return, at the third look, the names of variables changed in place between all looks.

        A variable that is set again in each step is computed from other values. Tensors that share
        memory with the training state, or are registered, are saved.
        """
        self._num_looks += 1
        frame = collectives.script_frame(sys._getframe(1))  # noqa: SLF001
        if self._num_looks > _LOOKS or frame is None:
            return []
        found: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
        for name, value in frame.f_locals.items():
            tensors = list(islice(_tensors(value), _TENSORS_MAX))
            marks = [(id(one), one._version) for one in tensors]  # noqa: SLF001
            before = self._seen.get(name)
            if self._num_looks == 1 or (
                before is not None
                and before[0] is value
                and len(before[1]) == len(marks)
                and before[1] != marks
            ):
                found[name] = value, marks
        self._seen = found
        if self._num_looks < _LOOKS:
            return []
        self._seen = {}
        known = {_memory(entry.tensor) for entry in sharded.state.entries()}
        known |= {_memory(one) for one in _tensors(sharded.registered.states(), depth=4)}
        return [
            name
            for name, (value, _) in found.items()
            if known.isdisjoint(map(_memory, _tensors(value)))
        ]


def _tensors(value: Any, depth: int = 1) -> Iterator[Tensor]:
    """Yield the tensors that a value is, or holds, and that no graph has made."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and value.grad_fn is None:
            yield value
    elif depth and isinstance(value, dict | list | tuple | Mapping):
        inside: Collection[Any] = value.values() if isinstance(value, Mapping) else value
        for one in inside:
            yield from _tensors(one, depth - 1)


def _memory(tensor: Tensor) -> int:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.untyped_storage().data_ptr()
