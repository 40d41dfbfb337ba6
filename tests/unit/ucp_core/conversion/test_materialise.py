"""The universal checkpoint is what other tools read, and is committed last."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.support.checkpoints import (
    ROOT,
    State,
    assert_loaded,
    random_state,
    save,
    small_state,
    whole_need,
)
from ucp_core.conversion import convert
from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.inspection import verify
from ucp_core.native import Checkpoint, load, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore, join

DIRECTORY = f"{ROOT}/step-00000007"


def _native(state: State | None = None, store: MemoryStore | None = None) -> Checkpoint:
    store = store or MemoryStore()
    save(store, state or small_state(), step=7, world_size=3)
    return open_checkpoint(store, DIRECTORY)


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    """By its own library, which checks offsets, gaps and alignment more strictly than we do."""
    state = small_state()
    convert(_native(), LocalStore(), str(tmp_path), memory_bytes=8 << 20, processes=1)

    for slot, family in (("weight", "model"), ("exp_avg", "exp_avg")):
        found = safetensors.numpy.load_file(tmp_path / f"{family}-00001-of-00001.safetensors")
        assert set(found) == {key.fqn for key in state if key.slot == slot}
        for fqn, array in found.items():
            whole = state[TensorKey(fqn, slot)]
            assert array.dtype == np.float32
            assert array.shape == whole.shape
            assert array.tobytes() == whole.data


def test_safetensors_reads_every_dtype_that_it_knows(tmp_path: Path) -> None:
    """Odd sizes of several dtypes in one file: alignment goes wrong there first."""
    for seed in range(20):
        state = random_state(random.Random(seed))
        out = tmp_path / str(seed)
        convert(_native(state), LocalStore(), str(out), memory_bytes=8 << 20, processes=1)
        for file in out.glob("*.safetensors"):
            slot = "weight" if file.name.startswith("model") else "exp_avg"
            with safetensors.safe_open(file, framework="numpy") as opened:
                for fqn in opened.keys():  # noqa: SIM118 - not a dict
                    part = opened.get_slice(fqn)
                    whole = state[TensorKey(fqn, slot)]
                    assert (part.get_dtype(), tuple(part.get_shape())) == (
                        whole.dtype,
                        whole.shape,
                    )


def test_the_index_is_the_usual_one(tmp_path: Path) -> None:
    """Other tools look there for the file of a weight."""
    convert(_native(), LocalStore(), str(tmp_path), memory_bytes=8 << 20, processes=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())

    assert index["weight_map"] == dict.fromkeys(
        ("head", "norm", "step", "wte"), "model-00001-of-00001.safetensors"
    )
    assert index["metadata"]["total_size"] == sum(
        len(whole.data) for key, whole in small_state().items() if key.slot == "weight"
    )


def test_large_families_are_cut_into_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor in one file, files in order of names, and their number in each name."""
    monkeypatch.setattr("ucp_core.formats.universal.FILE_BYTES_MAX", 150)
    store = MemoryStore()
    convert(_native(), store, "out", memory_bytes=8 << 20, processes=1)

    assert [name for name in store.list("out") if name.startswith("model-")] == [
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    made = open_checkpoint(store, "out")
    assert verify(made) == []
    need = whole_need(small_state())
    load(made, need)
    assert_loaded(small_state(), need)


def test_extra_values_keep_their_names_whatever_they_are() -> None:
    """Names become file names, and a name can be anything."""
    extra = {"rng": [1, 2.5, None], "a/b ../c": {"x": "y"}, "Ü.json": 3, "": "empty"}
    store = MemoryStore()
    opened = _native(store=store)
    native = Checkpoint(
        store=store,
        directory=DIRECTORY,
        manifest=replace(opened.manifest, extra=extra),
    )

    convert(native, store, "out", memory_bytes=8 << 20, processes=1)

    made = open_checkpoint(store, "out")
    assert made.extra == extra
    assert verify(made) == []


def test_a_damaged_source_gives_no_checkpoint() -> None:
    """Garbage with a fresh checksum would be garbage for ever."""
    source = _native()
    path = join(DIRECTORY, "a0001-r00001.bin")
    data = bytearray(source.store.read(path))
    data[0] ^= 1
    source.store.write_atomic(path, data, fsync=False)
    out = MemoryStore()

    with pytest.raises(CheckpointCorruptError):
        convert(source, out, "out", memory_bytes=8 << 20, processes=1)
    assert not out.exists("out/manifest.json")


def test_every_element_is_aligned_in_its_file() -> None:
    """Memory-mapped tensors of other tools need it, and misaligned reads are slow."""
    for seed in range(20):
        native = _native(random_state(random.Random(seed), num_tensors=9))
        convert(native, native.store, "out", memory_bytes=8 << 20, processes=1)
        for opened in (native, open_checkpoint(native.store, "out")):
            for entry in opened.state_map.entries.values():
                itemsize = DTYPE_BYTES[entry.dtype]
                assert all(f.offset_bytes % itemsize == 0 for f in entry.fragments)


def test_a_source_that_holds_elements_twice_is_refused() -> None:
    """It is unknown which of the two is right; and not every manifest was made by our commit."""
    source = _native()
    key = TensorKey("step", "weight")
    entry = source.state_map.entries[key]
    twice = replace(entry, fragments=entry.fragments * 2)
    state_map = replace(source.state_map, entries={**source.state_map.entries, key: twice})
    doubled = replace(source, manifest=replace(source.manifest, state_map=state_map))

    with pytest.raises(UncoveredRegionError, match=r"step \(weight\): box \[\] is held twice"):
        convert(doubled, MemoryStore(), "out", memory_bytes=8 << 20, processes=1)


def test_progress_ends_with_the_whole_state() -> None:
    """A bar that stops at 97 % makes people wait."""
    seen: list[tuple[int, int]] = []
    source = _native()

    convert(
        source,
        MemoryStore(),
        "out",
        memory_bytes=8 << 20,
        processes=1,
        progress=lambda done, total: seen.append((done, total)),
    )

    assert seen[-1] == (source.state_map.num_bytes, source.state_map.num_bytes)
    assert seen == sorted(seen)
