"""Whatever lies how in foreign files: any box of it loads as numpy would cut it."""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.foreign_maps import Foreign, index, random_box, random_foreign
from tests.support.made import room_for
from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry import Box, StateMap
from ucp_core.native import Checkpoint, LocalTensor, load
from ucp_core.native import opening as _open
from ucp_core.numerics import decode, encode
from ucp_core.reading import Mapped, transfer
from ucp_core.reading import planning as _planning
from ucp_core.storage import MemoryStore, ReadRange

SEEDS = st.integers(0, 2**32)


class _MappedStore(MemoryStore):
    """Files that need not be read, because they are in memory: the bytes are taken from there."""

    def mapped(self, path: str) -> Mapped | None:
        return Mapped(memoryview(self.read(path)), lambda _: None)


class _AskedStore(MemoryStore):
    """Files that are far away: what is asked for ahead is read next, by the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: defaultdict[int, deque[tuple[str, int, int]]] = defaultdict(deque)

    def ahead(self, path: str, ranges: Sequence[tuple[int, int]]) -> None:
        asked = self.asked[threading.get_ident()]
        asked += [(path, offset_bytes, size_bytes) for offset_bytes, size_bytes in ranges]

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        asked = self.asked[threading.get_ident()]
        for offset_bytes, buffers in ranges:
            if asked:
                assert asked.popleft() == (path, offset_bytes, sum(map(len, buffers)))
        super().read_ranges(path, ranges)


def _made(seed: int) -> tuple[random.Random, Foreign]:
    rng = random.Random(seed)
    store = rng.choice((MemoryStore, _MappedStore, _AskedStore))()
    # Small requests make small tensors meet every case of large ones.
    store.request_bytes = rng.choice((32, 256, 1 << 20))
    return rng, random_foreign(rng, store, block_bytes=rng.choice((8, 64, 1 << 20)))


def _needs(rng: random.Random, made: Foreign) -> list[LocalTensor]:
    entries = made.checkpoint.state_map.entries.values()
    return [room_for(e, random_box(rng, e.shape)) for e in entries for _ in range(2)]


def _assert_equal(made: Foreign, need: Iterable[LocalTensor]) -> None:
    for tensor in need:
        expected = next(v for k, v in made.values.items() if k.fqn == tensor.fqn)
        assert bytes(tensor.data) == expected[index(tensor.box)].tobytes(), tensor


@settings(deadline=None, max_examples=3 * settings().max_examples)
@given(seed=SEEDS)
def test_any_box_of_any_foreign_map_is_what_numpy_cuts(seed: int) -> None:
    """Strided, spread, permuted, replicated, averaged, with and without checksums."""
    rng, made = _made(seed)
    made.checkpoint.state_map.prove_coverage()
    need = _needs(rng, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_open, "_SPAN_BYTES_MAX", rng.choice((64, 1 << 20)))
        patch.setattr(_open, "_DIRECT_BYTES_MAX", rng.choice((64, 1 << 20)))
        patch.setattr(transfer, "_RUN_GAP_BYTES_MIN", rng.choice((1, 8, 1 << 20)))
        patch.setattr(_planning, "_RUNS_MAX", rng.choice((3, 1024)))
        load(made.checkpoint, need, threads=rng.choice((1, 3)))

    _assert_equal(made, need)
    store = made.checkpoint.store
    if isinstance(store, _AskedStore):
        assert not any(store.asked.values()), "asked for, and never read"


@settings(deadline=None, max_examples=150)
@given(seed=SEEDS)
def test_a_map_with_a_hole_is_an_error_and_never_garbage(seed: int) -> None:
    """A primary fragment that is taken away: what needs it fails, what does not loads."""
    rng, made = _made(seed)
    state_map = made.checkpoint.state_map
    entries = dict(state_map.entries)
    key = rng.choice(sorted(entries))
    entry = entries[key]
    primary = [fragment for fragment in entry.fragments if not fragment.replica]
    if not primary:
        return
    gone = rng.choice(primary)
    rest = tuple(f for f in entry.fragments if (f.box, f.copy) != (gone.box, gone.copy))
    entries[key] = replace(entry, fragments=rest)
    holed = _with_map(made.checkpoint, replace(state_map, entries=entries))

    with pytest.raises(UncoveredRegionError, match="is in none of the files") as caught:
        holed.state_map.prove_coverage()
    assert caught.value.facts["fqn"] == key.fqn
    with pytest.raises(UncoveredRegionError, match=r"is in no file"):
        load(holed, [room_for(entry, Box.full(entry.shape))])
    need = [tensor for tensor in _needs(rng, made) if tensor.fqn != key.fqn]
    load(holed, need)
    _assert_equal(made, need)


def _with_map(checkpoint: Checkpoint, state_map: StateMap) -> Checkpoint:
    return replace(checkpoint, manifest=replace(checkpoint.manifest, state_map=state_map))


@given(seed=SEEDS)
def test_a_fragment_that_contradicts_its_tensor_is_refused(seed: int) -> None:
    """Sizes, strides, copies: a reader's mistake must not become somebody's weights."""
    rng, made = _made(seed)
    state_map = made.checkpoint.state_map
    entry = rng.choice(sorted(state_map.entries.values(), key=lambda e: e.key))
    if not entry.fragments:
        return
    good = rng.choice(entry.fragments)
    bad = rng.choice(
        [
            good._replace(num_bytes=good.num_bytes + 1),
            good._replace(copy=entry.copies),
            good._replace(strides=(*good.byte_strides(1), 8)),
            good._replace(box=Box((*good.box.start, 0), (*good.box.stop, 1))),
            good._replace(strides=tuple(-4 for _ in entry.shape) or (1,)),
        ]
    )
    fragments = tuple(bad if f is good else f for f in entry.fragments)
    entries = {**state_map.entries, entry.key: replace(entry, fragments=fragments)}

    with pytest.raises(CheckpointCorruptError, match=entry.key.fqn):
        replace(state_map, entries=entries).prove_coverage()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_every_small_float_comes_back_from_fp64(dtype: str) -> None:
    """Subnormals, zeros of both signs and infinities too; what is no number stays none."""
    size = 1 if dtype.startswith("F8") else 2
    codes = np.arange(1 << (8 * size)).astype(f"u{size}")
    values = decode(dtype, codes.data.cast("B"))
    back = encode(dtype, values).view(codes.dtype)
    is_number = ~np.isnan(values)

    assert np.array_equal(back[is_number], codes[is_number])
    assert np.isnan(decode(dtype, back[~is_number].data.cast("B"))).all()
    assert np.count_nonzero(~is_number) < len(codes) // 16


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_a_mean_is_rounded_once_to_the_nearest(numbers: list[float]) -> None:
    """By way of fp32 some would be rounded twice, to the wrong neighbour."""
    value = np.array([np.mean(np.clip(numbers, -3e38, 3e38))])
    for dtype, codes in (("BF16", "u2"), ("F16", "u2"), ("F8_E4M3", "u1"), ("F8_E5M2", "u1")):
        every = np.arange(1 << (8 * np.dtype(codes).itemsize)).astype(codes)
        known = decode(dtype, every.data.cast("B"))
        known = known[np.isfinite(known)]
        scaled = value if abs(value[0]) <= known.max() else value * known.max() / 3e38
        rounded = decode(dtype, encode(dtype, scaled).data.cast("B"))
        assert abs(rounded[0] - scaled[0]) == np.abs(known - scaled[0]).min()
