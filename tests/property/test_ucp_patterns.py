"""Whatever spread a tensor, what patterns and operators say of its shards gives it back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shards import (
    Spread,
    assembled,
    random_spread,
    zero_partitions,
)
from ucp_core.boxes import Box
from ucp_core.checkpoint import Checkpoint
from ucp_core.errors import UncoveredRegionError
from ucp_core.manifest import Kind, Manifest
from ucp_core.operators import extract, load, union
from ucp_core.patterns import place
from ucp_core.plan import Part
from ucp_core.statemap import Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.storage import MemoryStore

SEEDS = st.integers(0, 2**32)
RANKS = st.integers(1, 6)
KEY = TensorKey("layers.0.w", "weight")


def _plain_files(spread: Spread) -> tuple[list[Fragment], dict[str, bytes]]:
    placement = place(spread.pattern, spread.shapes)
    fragments: list[Fragment] = []
    files: dict[str, bytes] = {}
    for rank, shard in enumerate(spread.shards):
        files[f"rank{rank}"] = b"head" * rank + shard.tobytes() + b"tail"
        fragments += extract(KEY, "I32", placement, rank, file=f"rank{rank}", offset_bytes=4 * rank)
    return fragments, files


def _checkpoint(entries: list[TensorEntry], files: dict[str, bytes]) -> Checkpoint:
    store = MemoryStore()
    for name, data in files.items():
        store.write_file(f"foreign/{name}", [data], fsync=False)
    manifest = Manifest(
        kind=Kind.FOREIGN,
        step=0,
        attempt=0,
        state_map=StateMap(entries={entry.key: entry for entry in entries}, block_bytes=1 << 20),
        files={},
    )
    return Checkpoint(store=store, directory="foreign", manifest=manifest)


@given(seed=SEEDS, ranks=RANKS)
def test_shards_of_any_pattern_give_back_the_tensor(seed: int, ranks: int) -> None:
    """Fused parts, padding and grids have each their own way of being put together wrongly."""
    spread = random_spread(random.Random(seed), ranks)
    fragments, files = _plain_files(spread)

    entry = union(KEY, "I32", place(spread.pattern, spread.shapes), fragments)

    assert entry.shape == spread.whole.shape
    assert np.array_equal(assembled(entry.shape, list(entry.fragments), files), spread.whole)


@given(seed=SEEDS, tp=st.integers(1, 4), dp=st.integers(1, 5))
def test_zero_ranges_of_any_shards_give_back_the_tensors(seed: int, tp: int, dp: int) -> None:
    """ZeRO flattens the shards of many tensors into one buffer, pads it and cuts it anywhere."""
    rng = random.Random(seed)
    spreads = [random_spread(rng, tp) for _ in range(3)]
    placements = [place(spread.pattern, spread.shapes) for spread in spreads]
    found: list[list[Fragment]] = [[] for _ in spreads]
    files: dict[str, bytes] = {}
    for rank in range(tp):
        mine = [i for i, spread in enumerate(spreads) if rank < len(spread.shards)]
        zero = zero_partitions(rng, [spreads[i].shards[rank] for i in mine], dp)
        files |= {f"tp{rank}dp{r}": data.tobytes() for r, data in enumerate(zero.data)}
        for number, index in enumerate(mine):
            size = spreads[index].shards[rank].size
            for part, at, flat in zero.overlaps(number, size):
                found[index] += extract(
                    KEY,
                    "I32",
                    placements[index],
                    rank,
                    file=f"tp{rank}dp{part}",
                    offset_bytes=4 * at,
                    flat=flat,
                )

    for spread, placement, fragments in zip(spreads, placements, found, strict=True):
        entry = union(KEY, "I32", placement, fragments)
        assert np.array_equal(assembled(entry.shape, list(entry.fragments), files), spread.whole)
        box = Box.full(entry.shape)
        need = Part(KEY, "I32", entry.shape, box)
        [loaded] = load(_checkpoint([entry], files), [need])
        assert bytes(loaded.data) == spread.whole.tobytes()


@given(seed=SEEDS, ranks=st.integers(2, 6))
def test_a_lost_or_doubled_file_is_named(seed: int, ranks: int) -> None:
    """A map with a hole reads what memory held before; one with an overlap, what came last."""
    spread = random_spread(random.Random(seed), ranks)
    placement = place(spread.pattern, spread.shapes)
    fragments, _ = _plain_files(spread)
    real = [f for f in fragments if not f.replica and f.box.num_elements]
    if not real:
        return
    lost = random.Random(seed).choice(real)

    with pytest.raises(UncoveredRegionError, match=r"layers\.0\.w \(weight\): box .* is in none"):
        union(KEY, "I32", placement, [f for f in fragments if f is not lost])
    twin = lost._replace(file="twin")
    with pytest.raises(UncoveredRegionError, match=r"is held twice, in .*twin"):
        union(KEY, "I32", placement, [*fragments, twin])
