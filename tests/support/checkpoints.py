"""Builders of states, shardings and checkpoints."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np

from tests.support.made import save_part, tensor_of
from ucp_core.geometry import DTYPE_BYTES, Box, TensorKey, flat_range
from ucp_core.native import (
    NOT_FINITE,
    Checkpoint,
    LocalTensor,
    SaveResult,
    checkpoint_name,
    load,
)
from ucp_core.reading import Part
from ucp_core.storage import Store, join

#: Boxes of each rank, by tensor.
Sharding: TypeAlias = list[dict[TensorKey, list[Box]]]

ROOT = "run/checkpoints"


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A logical tensor with all its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def cut(self, box: Box) -> bytes:
        """Return the bytes of a box, by numpy's indexing."""
        dtype = np.dtype(f"V{DTYPE_BYTES[self.dtype]}")
        whole = np.frombuffer(self.data, dtype).reshape(self.shape)
        return whole[tuple(map(slice, box.start, box.stop))].tobytes()


State: TypeAlias = dict[TensorKey, Whole]


def random_state(rng: random.Random, num_tensors: int = 5) -> State:
    """Return tensors of all sorts: 0-d, empty, uneven, several dtypes and slots."""
    state: State = {}
    for index in range(num_tensors):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 7)) for _ in range(rng.randint(0, 3)))
        for slot in ("weight", "exp_avg")[: rng.randint(1, 2)]:
            dtype = rng.choice(sorted(DTYPE_BYTES))
            data = rng.randbytes(prod(shape) * DTYPE_BYTES[dtype])
            state[TensorKey(f"layers.{index}.w", slot)] = Whole(dtype=dtype, shape=shape, data=data)
    return state


def random_sharding(rng: random.Random, state: State, world_size: int) -> Sharding:
    """Return who holds what: rows, columns, grids, flat ranges or whole, each element once."""
    sharding: Sharding = [{} for _ in range(world_size)]
    for key, tensor in state.items():
        for box in cuts(rng, tensor.shape, world_size):
            sharding[rng.randrange(world_size)].setdefault(key, []).append(box)
    return sharding


def cuts(rng: random.Random, shape: tuple[int, ...], parts: int) -> list[Box]:
    """Return boxes that hold each element once: flat ranges, or pieces along some dims."""
    if rng.random() < 0.4:
        total = prod(shape)
        marks = sorted([0, total, *(rng.randint(0, total) for _ in range(parts - 1))])
        ranges = pairwise(marks)
        return [box for a, b in ranges for box in flat_range(shape, a, b)]
    boxes = [Box.full(shape)]
    for dim in range(len(shape)):
        if rng.random() < 0.6:
            boxes = [piece for box in boxes for piece in box.split(dim, parts)]
    return boxes


def local_tensors(state: State, held: dict[TensorKey, list[Box]]) -> list[LocalTensor]:
    """Return what one rank gives to ``save_rank``."""
    return [
        tensor_of(
            key.fqn,
            state[key].shape,
            memoryview(state[key].cut(box)),
            slot=key.slot,
            dtype=state[key].dtype,
            box=box,
        )
        for key, boxes in held.items()
        for box in boxes
    ]


def empty_tensors(state: State, held: dict[TensorKey, list[Box]]) -> list[LocalTensor]:
    """Return what one rank gives to ``load``: memory of its own, filled with something else."""
    return [
        tensor_of(
            key.fqn,
            state[key].shape,
            memoryview(bytearray(b"\xa5" * (box.num_elements * DTYPE_BYTES[state[key].dtype]))),
            slot=key.slot,
            dtype=state[key].dtype,
            box=box,
        )
        for key, boxes in held.items()
        for box in boxes
    ]


def assert_loaded(state: State, tensors: Sequence[LocalTensor]) -> None:
    """Check every byte that was loaded."""
    for tensor in tensors:
        key = TensorKey(tensor.fqn, tensor.slot)
        assert bytes(tensor.data) == state[key].cut(tensor.box), f"{key} {tensor.box}"


def small_state(seed: int = 0) -> State:
    """Return a state of four tensors that is quick to save."""
    rng = random.Random(seed)
    shapes = {"wte": (8, 4), "norm": (4,), "head": (3, 5), "step": ()}
    return {
        TensorKey(fqn, slot): Whole(dtype="F32", shape=shape, data=rng.randbytes(4 * prod(shape)))
        for fqn, shape in shapes.items()
        for slot in ("weight", "exp_avg")
    }


def save(
    store: Store,
    state: State,
    *,
    step: int,
    attempt: int = 1,
    world_size: int = 2,
    ranks: Iterable[int] | None = None,
    sharding: Sharding | None = None,
    root: str = ROOT,
) -> list[SaveResult]:
    """Save ``state`` by every rank, or by ``ranks`` only, in their order."""
    held = sharding or random_sharding(random.Random(step), state, world_size)
    return [
        save_part(
            store,
            join(root, checkpoint_name(step)),
            local_tensors(state, held[rank]),
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            extra={"cursor": {"step": step}},
            param_groups=[{"params": [f"of.rank.{rank}"], "lr": 0.1}],
            source={"name": "test"},
        )
        for rank in (range(world_size) if ranks is None else ranks)
    ]


def save_not_finite(
    store: Store, state: State, *, step: int, sound_step: int, root: str = ROOT
) -> None:
    """Save ``state`` by one rank, which says that step ``sound_step`` is the newest finite one."""
    extra = {NOT_FINITE: {"in_a_row": 1, "sound_step": sound_step}}
    save_with(store, state, step=step, root=root, extra=extra)


def save_with(
    store: Store, state: State, *, step: int, extra: dict[str, Any], root: str = ROOT
) -> None:
    """Save ``state`` by one rank with small named values."""
    save_part(
        store,
        join(root, checkpoint_name(step)),
        local_tensors(state, random_sharding(random.Random(step), state, 1)[0]),
        step=step,
        extra=extra,
    )


def whole_need(state: State) -> list[LocalTensor]:
    """Return memory for every tensor in whole."""
    return empty_tensors(state, {key: [Box.full(t.shape)] for key, t in state.items()})


def load_parts(checkpoint: Checkpoint, parts: Iterable[Part]) -> list[LocalTensor]:
    """Return parts of a checkpoint in new memory."""
    tensors = [
        tensor_of(
            part.key.fqn,
            part.shape,
            memoryview(bytearray(part.box.num_elements * DTYPE_BYTES[part.dtype])),
            slot=part.key.slot,
            dtype=part.dtype,
            box=part.box,
        )
        for part in parts
    ]
    load(checkpoint, tensors)
    return tensors
