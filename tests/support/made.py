"""Messages, tensors and files of a run; whatever a test does not care about has a value."""

from collections.abc import Iterable, Sequence
from typing import Any

from ucp_core.geometry import DTYPE_BYTES, Box, TensorEntry
from ucp_core.layout import ParallelLayout
from ucp_core.lineage import Lineage
from ucp_core.native import LocalTensor, SaveResult, save_rank
from ucp_core.storage import Store
from workers.protocol import Assignment, Held


def assignment_of(
    rank: int = 0,
    *,
    attempt: int = 1,
    layout: ParallelLayout | None = None,
    store_port: int = 0,
    resume: tuple[int, int] = (0, 0),
    lineage: Lineage | None = None,
    **more: Any,
) -> Assignment:
    """Return the place of a worker in an attempt that continues behind ``resume``."""
    return Assignment(
        attempt=attempt,
        rank=rank,
        layout=layout or ParallelLayout(),
        store_host="127.0.0.1",
        store_port=store_port,
        resume_step=resume[0],
        resume_attempt=resume[1],
        lineage=tuple(lineage) if lineage is not None else ((attempt, resume[0]),),
        **more,
    )


def held_of(
    step: int,
    rank: int = 0,
    *,
    attempt: int = 1,
    world_size: int = 2,
    data_bytes: int = 10,
    record_bytes: int = 1,
    buffer: int = 0,
    sequence: int = 2,
) -> Held:
    """Return what a buffer says that has the part of a rank."""
    return Held(
        buffer=buffer,
        sequence=sequence,
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=world_size,
        data_bytes=data_bytes,
        record_bytes=record_bytes,
    )


def tensor_of(
    fqn: str,
    shape: Sequence[int],
    data: Any,
    *,
    slot: str = "weight",
    dtype: str = "F32",
    box: Box | None = None,
    replica: bool = False,
) -> LocalTensor:
    """Return memory that holds a tensor, or the box of it."""
    whole = tuple(shape)
    return LocalTensor(
        fqn=fqn,
        slot=slot,
        dtype=dtype,
        shape=whole,
        box=box if box is not None else Box.full(whole),
        data=data,
        replica=replica,
    )


def room_for(entry: TensorEntry, box: Box | None = None) -> LocalTensor:
    """Return memory to load a tensor into, or a box of it, filled with something else."""
    box = box if box is not None else Box.full(entry.shape)
    data = memoryview(bytearray(b"\xa5" * (box.num_elements * DTYPE_BYTES[entry.dtype])))
    return tensor_of(
        entry.key.fqn, entry.shape, data, slot=entry.key.slot, dtype=entry.dtype, box=box
    )


def save_part(
    store: Store,
    directory: str,
    tensors: Iterable[LocalTensor],
    *,
    step: int = 1,
    attempt: int = 1,
    rank: int = 0,
    world_size: int = 1,
    **more: Any,
) -> SaveResult:
    """Save the part of a rank, without anything beside its tensors."""
    beside: dict[str, Any] = {"extra": {}, "param_groups": [], "source": {}, "fsync": False}
    return save_rank(
        store,
        directory,
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        tensors=list(tensors),
        **{**beside, **more},
    )
