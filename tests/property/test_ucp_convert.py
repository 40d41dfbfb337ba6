"""Conversion of any foreign checkpoint: the values that numpy computes, and no damage passes."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.foreign_maps import DIRECTORY, Foreign, random_foreign
from ucp_core.conversion import convert
from ucp_core.conversion import job as conversion
from ucp_core.conversion import outputs as files
from ucp_core.conversion import work_items as work
from ucp_core.errors import CheckpointCorruptError
from ucp_core.geometry import Box, flat_range, packed_strides
from ucp_core.inspection import verify
from ucp_core.native import open_checkpoint
from ucp_core.reading import Holders, is_plain, scattered
from ucp_core.storage import LocalStore, MemoryStore

SEEDS = st.integers(0, 2**32)


@pytest.fixture(params=[16, 1 << 20], ids=["tiny blocks", "real blocks"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 16 bytes make small tensors meet every case of large ones."""
    size: int = request.param
    for module in (conversion, work, files):
        monkeypatch.setattr(module, "BLOCK_BYTES", size)
    return size


def _foreign(seed: int, block_bytes: int) -> tuple[Foreign, MemoryStore]:
    store = MemoryStore()
    return random_foreign(random.Random(seed), store, block_bytes=block_bytes), store


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=SEEDS)
def test_any_foreign_checkpoint_converts(seed: int, block_bytes: int) -> None:
    """Strides, padding, replicas, averages, checksums or none; from memory, to a directory."""
    foreign, _ = _foreign(seed, block_bytes)
    with tempfile.TemporaryDirectory() as out:
        convert(foreign.checkpoint, LocalStore(), out, memory_bytes=8 << 20, processes=1)
        made = open_checkpoint(LocalStore(), out)
        assert verify(made) == []
        for key, entry in made.state_map.entries.items():
            fragment = entry.fragments[0]
            data = (Path(out) / fragment.file).read_bytes()
            found = data[fragment.offset_bytes : fragment.offset_bytes + fragment.num_bytes]
            assert found == foreign.values[key].tobytes(), key


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=SEEDS, data=st.data())
def test_no_flipped_bit_of_a_foreign_checkpoint_passes(
    seed: int, data: st.DataObject, block_bytes: int
) -> None:
    """In any byte that a tensor is made of, or that lies in its record."""
    foreign, store = _foreign(seed, block_bytes)
    places = [
        (fragment.file, low)
        for entry in foreign.checkpoint.state_map.entries.values()
        for fragment in entry.fragments
        for low in (fragment.offset_bytes, fragment.offset_bytes + fragment.num_bytes - 1)
        if not fragment.box.is_empty
    ]
    if not places:
        return
    file, where = data.draw(st.sampled_from(places))
    damaged = bytearray(store.read(f"{DIRECTORY}/{file}"))
    damaged[where] ^= 1 << data.draw(st.integers(0, 7))
    store.write_atomic(f"{DIRECTORY}/{file}", damaged, fsync=False)
    out = tempfile.mkdtemp()
    try:
        with pytest.raises(CheckpointCorruptError):
            convert(foreign.checkpoint, LocalStore(), out, memory_bytes=8 << 20, processes=1)
        assert not (Path(out) / "manifest.json").exists()
    finally:
        shutil.rmtree(out, ignore_errors=True)


@given(seed=SEEDS, data=st.data())
def test_flat_ranges_are_made_of_runs(seed: int, data: st.DataObject) -> None:
    """Every element of a range once, each run side by side in its fragment."""
    foreign, _ = _foreign(seed, 16)
    for entry in foreign.checkpoint.state_map.entries.values():
        whole = Box.full(entry.shape)
        if not is_plain(entry) or whole.is_empty:
            continue
        start = data.draw(st.integers(0, whole.num_elements - 1))
        stop = data.draw(st.integers(start + 1, whole.num_elements))
        strides = packed_strides(entry.shape, 1)
        seen: list[int] = []
        for run in Holders(entry).runs(start, stop):
            assert run.first >= 0
            assert run.first + run.num_elements <= run.fragment.box.num_elements
            if run.target >= 0:
                seen += range(run.target, run.target + run.num_elements)
                continue
            for _, box, first in scattered(run, entry.shape, start):
                for inner in flat_range(box.shape, 0, box.num_elements):
                    seen += [first + offset for offset in _offsets(inner, strides)]
        assert sorted(seen) == list(range(stop - start))


def _offsets(box: Box, strides: tuple[int, ...]) -> list[int]:
    found = [0]
    for low, high, stride in zip(box.start, box.stop, strides, strict=True):
        found = [base + index * stride for base in found for index in range(low, high)]
    return found
