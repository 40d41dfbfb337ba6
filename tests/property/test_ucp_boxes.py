"""Boxes against numpy, which knows where elements are."""

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucp_core.errors import UncoveredRegionError
from ucp_core.geometry import (
    Box,
    Fragment,
    TensorEntry,
    TensorKey,
    flat_range,
    is_contiguous,
    prove_entry,
    span,
)
from ucp_core.geometry.boxes import runs

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def _shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(_boxes(shape)) for _ in range(count)]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


def _positions(shape: tuple[int, ...], box: Box) -> list[int]:
    flat: list[int] = np.arange(prod(shape)).reshape(shape)[_index(box)].ravel().tolist()
    return flat


@given(_shape_and_boxes(2))
def test_intersecting_and_subtracting_part_the_elements(
    made: tuple[tuple[int, ...], list[Box]],
) -> None:
    """Each element of the first box is in exactly one of the pieces, none else is."""
    shape, (one, two) = made
    count = np.zeros(shape, int)
    inner = one.intersect(two)
    for piece in (*one.subtract(two), *([inner] if inner else [])):
        assert not piece.is_empty
        count[_index(piece)] += 1
    expected = np.zeros(shape, int)
    expected[_index(one)] = 1

    np.testing.assert_array_equal(count, expected)


@given(_shape_and_boxes(1))
def test_runs_and_span_are_where_numpy_finds_the_elements(
    made: tuple[tuple[int, ...], list[Box]],
) -> None:
    """A run too short or too far reads another tensor's bytes."""
    shape, (box,) = made
    found = list(runs(box, Box.full(shape)))
    expected = _positions(shape, box)

    assert [i for low, high in found for i in range(low, high)] == expected
    assert all(high < low for (_, high), (low, _) in pairwise(found))
    if expected:
        assert span(box, Box.full(shape)) == (expected[0], expected[-1] + 1)
        assert is_contiguous(box, Box.full(shape)) == (len(found) == 1)


@given(SHAPES.flatmap(lambda s: st.tuples(st.just(s), st.integers(0), st.integers(0))))
def test_a_flat_range_holds_its_positions_in_order(made: tuple[tuple[int, ...], int, int]) -> None:
    """At any cut, and in few boxes."""
    shape, a, b = made
    total = prod(shape)
    start, stop = sorted((a % (total + 1), b % (total + 1)))
    boxes = flat_range(shape, start, stop)

    assert [i for box in boxes for i in _positions(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(_shape_and_boxes(1), st.integers(1, 6), st.integers(0, 3))
def test_a_split_parts_the_box(
    made: tuple[tuple[int, ...], list[Box]], parts: int, dim: int
) -> None:
    """Also where there are more parts than elements."""
    shape, (box,) = made
    if not shape:
        return
    pieces = box.split(dim % len(shape), parts)

    assert len(pieces) == parts
    assert sorted(i for piece in pieces for i in _positions(shape, piece)) == _positions(shape, box)


@given(_shape_and_boxes(4))
def test_the_coverage_proof_says_what_counting_says(
    made: tuple[tuple[int, ...], list[Box]],
) -> None:
    """Random boxes nearly always leave holes or overlap; a tiling must pass."""
    shape, boxes = made
    tiling = [Box.full(shape)]
    for box in boxes[:2]:
        inner = [i for t in tiling if (i := t.intersect(box))]
        tiling = [piece for t in tiling for piece in t.subtract(box)] + inner

    for candidate in (tiling, tiling[1:], [*tiling, *boxes[2:3]], boxes):
        count = np.zeros(shape, int)
        for box in candidate:
            count[_index(box)] += 1
        fragments = tuple(Fragment(box, "f", 0, box.num_elements, 0, (0,)) for box in candidate)
        entry = TensorEntry(
            key=TensorKey("w", "weight"), dtype="U8", shape=shape, fragments=fragments
        )
        try:
            prove_entry(entry)
        except UncoveredRegionError:
            assert (count != 1).any()
        else:
            assert (count == 1).all()
