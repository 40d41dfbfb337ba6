"""Whatever spread a tensor, what patterns and operators say of its shards gives it back."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from operator import add, mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import load_parts
from tests.support.shards import (
    Spread,
    assembled,
    random_array,
    random_average,
    random_spread,
    zero_partitions,
)
from ucp_core.errors import RulesError, UncoveredRegionError
from ucp_core.geometry import Box, Fragment, StateMap, TensorEntry, TensorKey, prove_entry
from ucp_core.language import (
    Affine,
    Average,
    Cut,
    Grid,
    Pattern,
    Replicated,
    extract,
    load_renames,
    load_rules,
    place,
    plain,
    split,
    strip_padding,
    union,
)
from ucp_core.language.affine import AffinePiece, piece_boxes
from ucp_core.manifest import Kind, Manifest
from ucp_core.native import Checkpoint
from ucp_core.reading import Part
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
        [loaded] = load_parts(_checkpoint([entry], files), [need])
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


def _pairs(
    shape: Sequence[int], source: tuple[int, Sequence[int]], dest: tuple[int, Sequence[int]]
) -> Counter[tuple[int, int]]:
    """Return the element of the tensor and the element of the shard, for each of a view."""
    found: Counter[tuple[int, int]] = Counter()
    for index in np.ndindex(*shape):
        ends = [at + sum(map(mul, index, strides)) for at, strides in (source, dest)]
        found[ends[0], ends[1]] += 1
    return found


@given(seed=SEEDS)
def test_boxes_of_a_strided_piece_are_its_elements(seed: int) -> None:
    """Offsets, strides and folded dims can carry into the next row on either side."""
    rng = random.Random(seed)
    ndim = rng.randint(1, 3)
    whole = [rng.randint(1, 5) for _ in range(ndim)]
    shard = [rng.randint(1, 5) for _ in range(ndim)]
    shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    sides: list[tuple[int, list[int]]] = []
    for extents in (whole, shard):
        near = [int(np.prod(extents[d:])) for d in range(ndim + 1)]
        strides = [rng.choice((*near, rng.randint(0, 6))) for _ in shape]
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        room = int(np.prod(extents)) - 1 - reach
        if room < 0:
            return
        sides.append((rng.randint(0, room), strides))
    (source, source_strides), (dest, dest_strides) = sides
    piece = AffinePiece(
        tuple(shape), source, tuple(source_strides), dest, tuple(dest_strides), (0,)
    )

    found: Counter[tuple[int, int]] = Counter()
    for box, start in piece_boxes(piece, whole, shard, what="w"):
        assert Box.full(shard).contains(box)
        for index in np.ndindex(*box.shape):
            there = np.ravel_multi_index(tuple(map(add, start, index)), whole)
            here = np.ravel_multi_index(tuple(map(add, box.start, index)), shard)
            found[int(there), int(here)] += 1

    assert found == _pairs(shape, sides[0], sides[1])


@given(seed=SEEDS, ranks=RANKS)
def test_the_mean_of_copies_covers_the_tensor_in_each(seed: int, ranks: int) -> None:
    """An average needs every copy whole; a hole in one of them is as bad as one in the tensor."""
    rng = random.Random(seed)
    whole, copies = random_average(rng, ranks)
    placement = place(Average(), [copy.shape for copy in copies])
    files: dict[str, bytes] = {}
    fragments: list[Fragment] = []
    for rank, copy in enumerate(copies):
        cut = rng.randint(0, copy.size)
        files[f"{rank}a"], files[f"{rank}b"] = (p.tobytes() for p in np.split(copy.ravel(), [cut]))
        for name, flat in (("a", (0, cut)), ("b", (cut, copy.size))):
            fragments += extract(
                KEY, "I32", placement, rank, file=f"{rank}{name}", offset_bytes=0, flat=flat
            )

    entry = union(KEY, "I32", placement, fragments)

    assert entry.copies == ranks
    mine = [[f for f in entry.fragments if f.copy == rank] for rank in range(ranks)]
    total = sum(assembled(entry.shape, found, files).astype(np.int64) for found in mine)
    assert np.array_equal(total, whole.astype(np.int64) * ranks)
    lost = rng.choice(fragments)
    with pytest.raises(UncoveredRegionError, match=r"layers\.0\.w .* is in none of the files"):
        union(KEY, "I32", placement, [f for f in fragments if f is not lost])


@given(seed=SEEDS, ranks=RANKS)
def test_a_split_tensor_is_placed_where_it_was(seed: int, ranks: int) -> None:
    """``split`` says how ranks would hold a tensor, ``place`` what those shards would be."""
    spread = random_spread(random.Random(seed), ranks)
    ranks = len(spread.shards)

    placement = split(spread.pattern, spread.whole.shape, ranks)

    assert placement.shape == spread.whole.shape
    even = isinstance(spread.pattern, Cut) and spread.pattern.part_widths is None
    if even and spread.pattern.widths is None and spread.pattern.unpadded is None:  # type: ignore[union-attr]
        again = place(spread.pattern, placement.shards)
        assert again == placement
    given_by_parts = isinstance(spread.pattern, Cut) and (
        spread.pattern.parts or spread.pattern.ratio or spread.pattern.part_widths
    )
    if given_by_parts or not isinstance(spread.pattern, Cut | Grid):
        assert placement == place(spread.pattern, spread.shapes)


@given(seed=SEEDS, ranks=RANKS)
def test_padding_stripped_later_is_padding_left_out(seed: int, ranks: int) -> None:
    """A vocabulary's true size may be known only when the tensor is already put together."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    shape[dim] *= ranks
    padded = random_array(rng, tuple(shape))
    shards = np.split(padded, ranks, dim)
    placement = place(Cut(dim), [shard.shape for shard in shards])
    files = {f"{rank}": np.ascontiguousarray(s).tobytes() for rank, s in enumerate(shards)}
    fragments = [
        f
        for rank in range(ranks)
        for f in extract(KEY, "I32", placement, rank, file=f"{rank}", offset_bytes=0)
    ]
    true = [rng.randint(0, extent) for extent in shape]

    entry = strip_padding(union(KEY, "I32", placement, fragments), true)

    prove_entry(entry)
    found = assembled(entry.shape, list(entry.fragments), files)
    assert np.array_equal(found, padded[tuple(map(slice, true))])


@given(seed=SEEDS, ranks=RANKS, tp=st.integers(1, 3))
def test_any_source_loads_as_any_target(seed: int, ranks: int, tp: int) -> None:
    """From one cut to another, without the tensor in between."""
    rng = random.Random(seed)
    spread = random_spread(rng, ranks)
    fragments, files = _plain_files(spread)
    entry = union(KEY, "I32", place(spread.pattern, spread.shapes), fragments)
    source = _checkpoint([entry], files)
    shape = spread.whole.shape
    targets: list[Pattern] = [Replicated(), *(Cut(dim) for dim in range(len(shape)))]

    for held in split(rng.choice(targets), shape, tp).pieces:
        ends = [tuple(map(add, start, local.shape)) for local, start, _ in held]
        boxes = [Box(piece.start, end) for piece, end in zip(held, ends, strict=True)]
        parts = [Part(KEY, "I32", shape, box) for box in boxes]
        for box, tensor in zip(boxes, load_parts(source, parts), strict=True):
            expected = spread.whole[tuple(map(slice, *box))]
            assert np.array_equal(np.frombuffer(tensor.data, np.int32), expected.ravel())


@given(seed=SEEDS, ranks=RANKS)
def test_an_average_loads_as_the_mean(seed: int, ranks: int) -> None:
    """Whole numbers have exact means here, so the result has to be equal bit for bit."""
    whole, copies = random_average(random.Random(seed), ranks)
    placement = place(Average(), [copy.shape for copy in copies])
    files = {str(rank): copy.astype(np.float64).tobytes() for rank, copy in enumerate(copies)}
    fragments = [
        fragment
        for rank in range(ranks)
        for fragment in extract(KEY, "F64", placement, rank, file=str(rank), offset_bytes=0)
    ]

    entry = union(KEY, "F64", placement, fragments)
    [loaded] = load_parts(
        _checkpoint([entry], files), [Part(KEY, "F64", whole.shape, Box.full(whole.shape))]
    )

    assert bytes(loaded.data) == whole.astype(np.float64).tobytes()


RULE_WORDS = (
    *("rules:", "- ", "match: ", "pattern: ", "{", "}", "[", "]", ", ", "\n", "\n  ", "cut: "),
    *("dim: ", "parts: ", "grid: ", "replicated", "unique", "average", "'a'", "0", "-1", "2.5"),
    *("affine: ", "ranks: ", "logical_shape: ", "extends: ", "llama"),
    *("&x ", "*x", "!!int ", "'(\\d+)'", "'('", "ties: ", "first_wins: ", "true", "? ", "\t"),
    *("ratio: ", "part_widths: ", "widths: ", "unpadded: ", "check: ", "slot: ", "---", "# "),
)


@given(seed=SEEDS, ranks=RANKS)
def test_a_pattern_as_json_is_the_same_rule(seed: int, ranks: int) -> None:
    """Manifests keep patterns so; a setting that was left out would be another pattern."""
    rng = random.Random(seed)
    affine = Affine(
        shape=(4, 6),
        shards=((4, 3),) * 2,
        pieces=tuple(
            (AffinePiece((4, 3), 3 * rank, (6, 1), 0, (3, 1), (rank,), rng.choice((1.0, 0.5))),)
            for rank in range(2)
        ),
    )
    spread = random_spread(rng, ranks).pattern
    for pattern in (spread, affine, Average(), Replicated("first"), Grid((Cut(1), Cut(0)), (2, 0))):
        text = json.dumps({"rules": [{"match": "w", "pattern": plain(pattern)}]})

        assert load_rules(text, "told").match("w", "weight") == pattern


@given(text=st.lists(st.sampled_from(RULE_WORDS), max_size=30).map("".join) | st.text())
def test_no_text_of_rules_breaks_the_reader(text: str) -> None:
    """Whatever is written, it is rules or an error that says where."""
    for read in (load_rules, load_renames):
        caught: list[RulesError] = []
        try:
            read(text, "fuzz")
        except RulesError as error:
            caught.append(error)
        assert all(error.facts["line"] >= 1 for error in caught)
        assert all(str(error).startswith("fuzz:") for error in caught)
