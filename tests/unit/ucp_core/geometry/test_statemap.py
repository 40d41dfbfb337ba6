"""The proof that every element is held exactly once."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.support.work import num_lines
from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry import (
    Box,
    Fragment,
    StateMap,
    TensorEntry,
    TensorKey,
    flat_range,
    prove_entry,
)

KEY = TensorKey("wte", "weight")


def _entry(shape: tuple[int, ...], *boxes: Box, replicas: int = 0) -> TensorEntry:
    fragments = tuple(
        Fragment(box, f"r{index}.bin", 0, 4 * box.num_elements, 0, (0,), index < replicas)
        for index, box in enumerate(boxes)
    )
    return TensorEntry(key=KEY, dtype="F32", shape=shape, fragments=fragments)


def test_a_hole_is_named() -> None:
    """A resharder that misses it hands out garbage for these elements."""
    entry = _entry((4, 4), Box((0, 0), (2, 4)), Box((2, 0), (4, 3)))

    with pytest.raises(UncoveredRegionError, match=r"wte \(weight\): box \[2:4, 3:4\]") as caught:
        prove_entry(entry)
    assert caught.value.facts["files"] == ["r0.bin", "r1.bin"]
    assert caught.value.facts["box"] == Box((2, 3), (4, 4))


def test_an_overlap_is_named_even_where_sizes_add_up() -> None:
    """A hole and an overlap of one size fool a proof that only counts."""
    entry = _entry((4,), Box((0,), (2,)), Box((1,), (3,)))

    with pytest.raises(UncoveredRegionError, match=r"\[1:2\] is held twice, in r0.bin and in r1"):
        prove_entry(entry)


def test_a_declared_replica_is_no_overlap() -> None:
    """Data-parallel ranks hold the same elements, and say so."""
    prove_entry(_entry((4,), Box((0,), (4,)), Box((0,), (4,)), replicas=1))
    with pytest.raises(UncoveredRegionError, match="is in none of the files"):
        prove_entry(_entry((4,), Box((0,), (4,)), replicas=1))


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    """Before it becomes an index."""
    with pytest.raises(UncoveredRegionError, match="reaches outside"):
        prove_entry(_entry((4,), Box((0,), (5,))))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_what_has_no_hole_passes(shape: tuple[int, ...]) -> None:
    """Scalars need one fragment; empty tensors need none."""
    prove_entry(_entry(shape, Box.full(shape)))
    if 0 in shape:
        prove_entry(_entry(shape))
    else:
        with pytest.raises(UncoveredRegionError):
            prove_entry(_entry(shape))


@pytest.mark.parametrize(
    "change",
    [
        {"box": Box((3,), (4,)), "num_bytes": 4},
        {"num_bytes": 4},
        {"replica": True},
        {"strides": (8,)},
        {"copy": 1},
    ],
    ids=["box", "num_bytes", "replica", "strides", "copy"],
)
def test_a_tensor_that_is_cut_otherwise_than_those_before_is_looked_at(
    change: dict[str, Any],
) -> None:
    """Layers are alike but for one: what is proven of the others says nothing of it."""
    good = _entry((4,), *Box.full((4,)).split(0, 2))
    first, second = good.fragments
    bad = replace(good, key=TensorKey("z", "weight"), fragments=(first, second._replace(**change)))
    layers = {TensorKey(f"layer{number}", "weight"): good for number in range(3)}

    StateMap(entries=layers, block_bytes=1).prove_coverage()
    with pytest.raises(CheckpointCorruptError, match=r"^z \(weight\): "):
        StateMap(entries={**layers, bad.key: bad}, block_bytes=1).prove_coverage()


def test_the_proof_looks_at_fragments_and_not_at_elements() -> None:
    """A tensor of 10^12 elements on 4096 ranks is proven in a moment."""
    work = {}
    for num_ranks in (2048, 4096):
        entry = _entry((1 << 20, 1 << 20), *Box.full((1 << 20, 1 << 20)).split(1, num_ranks))
        work[num_ranks] = num_lines(StateMap(entries={KEY: entry}, block_bytes=1).prove_coverage)

    assert work[4096] < 2.5 * work[2048]
    assert work[4096] < 100 * 4096


def test_ranges_of_flattened_experts_are_proven_quickly() -> None:
    """Their boxes begin in any column and have all of them: a sweep along columns is n * n."""
    shape = (8, 4096, 1024)
    total = 8 * 4096 * 1024
    work = {}
    for parts in (1024, 2048):
        marks = [total * i // parts + i * 7 % 1000 for i in range(1, parts)]
        ranges = pairwise([0, *marks, total])
        entry = _entry(shape, *(box for a, b in ranges for box in flat_range(shape, a, b)))
        work[parts] = num_lines(partial(prove_entry, entry))
        assert len(entry.fragments) > 2 * parts

    assert work[2048] < 2.5 * work[1024]
    assert work[2048] < 400 * 2048
