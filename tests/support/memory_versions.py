"""Small states in arenas: what each rank of a run would have written there, and how it loads."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tests.support.filling import FilledStore
from tests.support.made import save_part, tensor_of
from ucp_core.geometry import Box
from ucp_core.lineage import Lineage
from ucp_core.native import LocalTensor, load
from workers.memory import Arena, Part, open_version
from workers.protocol import Held

State: TypeAlias = Mapping[str, np.ndarray]

_SHAPES = {"embed": (333, 80), "bias": (5,), "scale": ()}


def make_state(seed: int) -> State:
    """Return values that differ with ``seed``."""
    rng = np.random.default_rng(seed)
    return {fqn: rng.standard_normal(shape).astype(np.float32) for fqn, shape in _SHAPES.items()}


def local_tensors(state: State, rank: int, world_size: int) -> list[LocalTensor]:
    """Return what ``rank`` holds under dim-0 sharding: copies, as a trainer would hand them."""
    tensors = []
    for fqn, value in state.items():
        whole = Box.full(value.shape)
        box = whole.split(0, world_size)[rank] if value.ndim else whole
        data = np.ascontiguousarray(value[tuple(map(slice, box.start, box.stop))])
        tensors.append(
            tensor_of(
                fqn,
                value.shape,
                memoryview(bytearray(data.tobytes())),
                replica=not value.ndim and rank > 0,
                box=box,
            )
        )
    return tensors


def write_version(
    arena: Arena,
    state: State,
    *,
    step: int,
    rank: int,
    world_size: int,
    attempt: int = 1,
    lineage: Lineage = (),
    kept: tuple[int, int] | None = None,
) -> Held:
    """Make the arena's next buffer the part of ``rank`` and return what it holds then."""
    buffer = arena.choose(lineage, kept=kept)
    arena.begin(buffer, attempt=attempt, step=step, rank=rank, world_size=world_size)
    save_part(
        FilledStore(arena, buffer),
        f"step-{step:08d}",
        local_tensors(state, rank, world_size),
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        extra={"cursor": step},
    )
    held = arena.held(buffer)
    assert held is not None
    return held


def complete_versions(parts: Sequence[Part]) -> dict[tuple[int, int], dict[int, Part]]:
    """Return the versions of which every rank's part is held, by (attempt, step), then by rank."""
    found: dict[tuple[int, int], dict[int, Part]] = {}
    for part in parts:
        held = part.held
        found.setdefault((held.attempt, held.step), {}).setdefault(held.rank, part)
    return {
        version: dict(sorted(by_rank.items()))
        for version, by_rank in sorted(found.items())
        if {part.held.world_size for part in by_rank.values()} == {len(by_rank)}
        and set(by_rank) == set(range(len(by_rank)))
    }


def check_loads(by_rank: Mapping[int, Part], state: State, *, world_size: int) -> None:
    """Load the version that the parts make up under another number of ranks, and compare."""
    checkpoint = open_version(by_rank)
    assert checkpoint.extra == {"cursor": checkpoint.step}
    for rank in range(world_size):
        zeros = {fqn: np.zeros_like(value) for fqn, value in state.items()}
        need = local_tensors(zeros, rank, world_size)
        load(checkpoint, need)
        for got, expected in zip(need, local_tensors(state, rank, world_size), strict=True):
            assert bytes(got.data) == bytes(expected.data), (got.fqn, rank)
