"""A stream of slabs has every byte once, in order, in memory that does not grow."""

import random
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import ROOT, State, Whole, save
from ucp_core.errors import UcpError
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.formats.huggingface import writer as huggingface_writer
from ucp_core.geometry import Box, TensorKey, slabs
from ucp_core.inspection import diff
from ucp_core.native import (
    MEMORY_BYTES_MIN,
    Checkpoint,
    Slab,
    SlabReader,
    TensorBox,
    open_checkpoint,
    stream,
    stream_box,
)
from ucp_core.storage import LocalStore, MemoryStore

MIB = 1 << 20


def _state(num_tensors: int, mib: int) -> State:
    rng = random.Random(0)
    return {
        TensorKey(f"layers.{n}.w", "weight"): Whole(
            dtype="F32", shape=(mib * 256, 1024), data=rng.randbytes(MIB) * mib
        )
        for n in range(num_tensors)
    }


def _checkpoint(store: MemoryStore, state: State) -> Checkpoint:
    save(store, state, step=7)
    return open_checkpoint(store, f"{ROOT}/step-00000007")


@pytest.mark.parametrize("bound", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 6, 1), (3, 0, 2)])
def test_boxes_follow_one_another_in_memory(shape: tuple[int, ...], bound: int) -> None:
    """A file is written from them as they come."""
    places = np.arange(int(np.prod(shape))).reshape(shape)

    boxes = list(slabs(Box.full(shape), bound))

    found = [places[tuple(map(slice, b.start, b.stop))].ravel() for b in boxes]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(places.size))
    assert all(0 < box.num_elements <= bound for box in boxes)


def test_a_slab_stays_as_it_is_while_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads ahead, into memory that was used before."""
    state = _state(8, 2)
    checkpoint = _checkpoint(MemoryStore(), state)
    entries = [checkpoint.state_map.entries[key] for key in sorted(state)]
    sizes: list[int] = []
    changed = threading.Condition()
    read = SlabReader.read

    def watched(self: SlabReader, pieces: Sequence[TensorBox]) -> list[Slab]:
        slabs = read(self, pieces)
        with changed:
            sizes.append(sum(piece.num_bytes for piece in pieces))
            changed.notify_all()
        return slabs

    monkeypatch.setattr(SlabReader, "read", watched)
    total = sum(entry.num_bytes for entry in entries)
    found = bytearray()
    for slab in stream(checkpoint, entries, memory_bytes=MEMORY_BYTES_MIN):
        before = bytes(slab.data)
        # Until the group behind the one that this slab is of is in memory too.
        with changed:
            group = next(g for g in range(len(sizes)) if sum(sizes[: g + 1]) > len(found))
            assert changed.wait_for(
                partial(lambda g: len(sizes) > g + 1 or sum(sizes) == total, group), timeout=30
            )
        assert bytes(slab.data) == before
        found += before

    assert len(sizes) > 4
    assert bytes(found) == b"".join(state[key].data for key in sorted(state))


def test_a_box_is_streamed_alone() -> None:
    """The tensor does not fit into memory."""
    state = _state(1, 8)
    checkpoint = _checkpoint(MemoryStore(), state)
    ((key, entry),) = checkpoint.state_map.entries.items()
    box = Box((100, 7), (1900, 800))

    slabs = stream_box(checkpoint, entry, box, memory_bytes=MEMORY_BYTES_MIN)

    assert b"".join(bytes(slab.data) for slab in slabs) == state[key].cut(box)


def _hugging_face(checkpoint: Checkpoint, out: Path) -> None:
    huggingface_writer.write(
        checkpoint, LocalStore(), str(out), memory_bytes=MEMORY_BYTES_MIN, dtype="bf16"
    )


def _dcp(checkpoint: Checkpoint, out: Path) -> None:
    dcp_writer.write(checkpoint, LocalStore(), str(out), memory_bytes=MEMORY_BYTES_MIN)


def _diff(checkpoint: Checkpoint, _: Path) -> None:
    report = diff(checkpoint, checkpoint, read_all=True, memory_bytes=MEMORY_BYTES_MIN)
    assert report.equal
    assert report.compared_bytes == 48 * MIB


@pytest.mark.parametrize("work", [_hugging_face, _dcp, _diff])
def test_memory_stays_under_the_bound(
    tmp_path: Path, work: Callable[[Checkpoint, Path], None]
) -> None:
    """Six times the bound of state goes through; one tensor alone is larger than it."""
    save(LocalStore(), _state(2, 24), step=7, root=str(tmp_path))
    checkpoint = open_checkpoint(LocalStore(), str(tmp_path / "step-00000007"))
    work(checkpoint, tmp_path / "warm")
    tracemalloc.start()
    try:
        work(checkpoint, tmp_path / "out")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes <= MEMORY_BYTES_MIN


def test_a_bound_that_cannot_be_kept_is_refused() -> None:
    """The blocks that are read would not fit."""
    checkpoint = _checkpoint(MemoryStore(), _state(1, 1))

    with pytest.raises(UcpError, match="give at least"):
        next(stream(checkpoint, [], memory_bytes=MEMORY_BYTES_MIN - 1))
