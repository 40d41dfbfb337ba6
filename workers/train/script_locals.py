"""Find values that a script's function changes in each step, but no version saves."""

import dis
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import islice, pairwise
from types import FrameType
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers import collectives
from workers.train.boundary import few_values
from workers.train.executor import ShardedModel

#: Number of looks, one after each of a run's first steps. Whatever changes between all of them is
#: reported.
_LOOKS: Final = 3
#: Maximum number of tensors in a variable; a collection may have one for each parameter.
_TENSORS_MAX: Final = 10_000
#: Packages whose objects keep nothing of the script's own.
_NOT_OWN: Final = ("builtins", "torch", "workers", "everstep")

#: A tensor's identity, how often it was written to, and a few of its values.
_Mark = tuple[int, int, bytes]


class ScriptLocals:
    """Inspect the local variables of the function that runs the loop, in a run's first steps."""

    def __init__(self) -> None:
        self._num_looks = 0
        #: The value of each variable, and marks of the tensors in it.
        self._seen: dict[str, tuple[Any, list[_Mark]]] = {}

    def look(self, sharded: ShardedModel) -> list[str]:
        """Return the names of variables that change between all looks, at the last one.

        Find tensors that change in place, in collections, modules and objects of the script's
        classes, and numbers that change by `count += 1`. Ignore variables that are set again in
        each step, because they follow from other values. Ignore tensors that are registered or
        share memory with the training state, because versions save them.
        """
        self._num_looks += 1
        frame = collectives.script_frame(sys._getframe(1))  # noqa: SLF001
        if self._num_looks > _LOOKS or frame is None:
            return []
        known = {_memory(entry.tensor) for entry in sharded.state.entries()}
        known |= {_memory(one) for one in _tensors(sharded.registered.states(), depth=4)}
        trained = {*sharded.model.modules(), *sharded.called.modules()}
        found: dict[str, tuple[Any, list[_Mark]]] = {}
        for name, value in _holders(frame.f_locals):
            tensors = list(islice(_tensors(value, trained=trained), _TENSORS_MAX))
            if not known.isdisjoint(map(_memory, tensors)):
                continue
            marks = [*map(_mark, tensors)]
            before = self._seen.get(name)
            if self._num_looks == 1 or (
                before is not None
                and before[0] is value
                and len(before[1]) == len(marks)
                and before[1] != marks
            ):
                found[name] = value, marks
        self._seen = found if self._num_looks < _LOOKS else {}
        return [*found, *_counts(frame)] if self._num_looks == _LOOKS else []


def _holders(held: Mapping[str, Any], depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield names and values that may hold tensors, and such attributes of the script's objects."""
    for name, value in held.items():
        if isinstance(value, Tensor | nn.Module | dict | list | tuple | Mapping):
            yield name, value
        elif depth and type(value).__module__.partition(".")[0] not in _NOT_OWN:
            for inner, one in _holders(getattr(value, "__dict__", {}), depth - 1):
                yield f"{name}.{inner}", one


def _tensors(value: Any, depth: int = 1, trained: Collection[nn.Module] = ()) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, except those that a graph has made.

    Skip the modules in ``trained``.
    """
    if isinstance(value, Tensor):
        if value.grad_fn is None:
            yield value
    elif isinstance(value, nn.Module):
        for module in value.modules():
            if module not in trained:
                yield from module.parameters(recurse=False)
                yield from module.buffers(recurse=False)
    elif depth and isinstance(value, dict | list | tuple | Mapping):
        inside: Collection[Any] = value.values() if isinstance(value, Mapping) else value
        for one in inside:
            yield from _tensors(one, depth - 1, trained)


def _counts(frame: FrameType) -> list[str]:
    """Return the names of numbers that the body of the loop counts, as by `count += 1`."""
    every = list(dis.get_instructions(frame.f_code))
    at = max((n for n, one in enumerate(every) if one.offset <= frame.f_lasti), default=0)
    if every[at].opname != "FOR_ITER":
        return []
    body = [one for one in every[at:] if one.offset < every[at].argval and one.opname != "SWAP"]
    counted, set_again = [], set()
    for before, one in pairwise(body):
        name = one.argval[0] if isinstance(one.argval, tuple) else one.argval
        if before.opname == "BINARY_OP" and before.argrepr.endswith("="):
            counted.append(name)
        elif one.opname.startswith("STORE_"):
            set_again.add(name)
    kept = [frame.f_locals, *(getattr(one, "__dict__", {}) for one in frame.f_locals.values())]
    return [
        name
        for name in dict.fromkeys(counted)
        if name not in set_again and any(isinstance(one.get(name), int | float) for one in kept)
    ]


def _mark(tensor: Tensor) -> _Mark:
    values = few_values(_local(tensor).detach()).cpu().numpy().tobytes()
    return id(tensor), tensor._version, values  # noqa: SLF001


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _memory(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()
