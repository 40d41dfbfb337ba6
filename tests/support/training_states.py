"""Training states as an optimizer has them, saved as a checkpoint that writers are given."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.made import save_part, tensor_of
from ucp_core.geometry import Box, TensorEntry, TensorKey
from ucp_core.native import Checkpoint, LocalTensor, open_checkpoint
from ucp_core.storage import Store

Array = npt.NDArray[Any]

#: By numpy's dtypes; bfloat16 is not one of them.
NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "float64": "F64"}


@dataclass(kw_only=True)
class TrainingState:
    """Parameters, slots of the optimizer by name of slot, groups, and what is not trained."""

    weights: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    groups: list[dict[str, Any]]
    frozen: dict[str, Array] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    step: int = 7

    def tensors(self) -> list[tuple[str, str, Array]]:
        """Return name, slot and values of everything."""
        found = [(n, "weight", a) for n, a in self.weights.items()]
        found += [(n, "weight", a) for n, a in {**self.frozen, **self.buffers}.items()]
        return found + [(n, s, a) for s, held in self.slots.items() for n, a in held.items()]

    def save(self, store: Store, directory: str, *, world_size: int = 2) -> Checkpoint:
        """Save it cut into rows over ranks, and return it opened."""
        for rank in range(world_size):
            save_part(
                store,
                directory,
                [
                    _rows(name, slot, array, rank, world_size)
                    for name, slot, array in self.tensors()
                ],
                step=self.step,
                rank=rank,
                world_size=world_size,
                extra=self.extra,
                param_groups=self.groups,
            )
        opened = open_checkpoint(store, directory)
        roles = dict.fromkeys(self.frozen, "frozen") | dict.fromkeys(self.buffers, "buffer")
        # A rank saves no empty box, and a tensor without elements has no other.
        entries = dict(opened.state_map.entries)
        for name, slot, array in self.tensors():
            key = TensorKey(name, slot)
            if 0 in array.shape:
                dtype = NAMES[array.dtype.name]
                entries[key] = TensorEntry(key=key, dtype=dtype, shape=array.shape, fragments=())
        state_map = replace(opened.state_map, entries=dict(sorted(entries.items())))
        manifest = replace(opened.manifest, state_map=state_map, ties=self.ties, roles=roles)
        return replace(opened, manifest=manifest)


def _rows(name: str, slot: str, array: Array, rank: int, world_size: int) -> LocalTensor:
    box = Box.full(array.shape)
    if array.shape:
        box = box.split(0, world_size)[rank]
    part = array[tuple(map(slice, box.start, box.stop))]
    return tensor_of(
        name,
        array.shape,
        memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data),
        slot=slot,
        dtype=NAMES[array.dtype.name],
        replica=not array.shape and rank > 0,
        box=box,
    )


def adam_state(
    shapes: Mapping[str, tuple[int, ...]], *, num_groups: int = 1, seed: int = 0
) -> TrainingState:
    """Return the state of AdamW over parameters of the given shapes, dealt to groups in turn."""
    rng = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(prod(shape)).astype(np.float32).reshape(shape)

    names = list(shapes)
    weights = {name: values(shape) for name, shape in shapes.items()}
    slots = {
        slot: {name: values(shape) for name, shape in shapes.items()}
        for slot in ("exp_avg", "exp_avg_sq")
    }
    slots["step"] = {name: np.array(7.0, np.float32) for name in names}
    groups = [
        {
            "params": names[index::num_groups],
            "lr": 10.0 ** -(index + 3),
            "betas": [0.9, 0.95 + index / 100],
            "eps": 1e-8,
            "weight_decay": 0.1 * index,
            "foreach": None,
        }
        for index in range(num_groups)
    ]
    return TrainingState(weights=weights, slots=slots, groups=groups)


def random_shapes(rng: random.Random, num_tensors: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of 1 to 3 dims by name; none is empty."""
    return {
        f"layers.{index}.w": tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        for index in range(num_tensors)
    }
