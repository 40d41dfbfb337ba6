"""Boxes by example; tests/property/test_ucp_boxes.py has them at random."""

import pytest

from ucp_core.geometry import Box, flat_range, is_contiguous, span
from ucp_core.geometry.boxes import runs


def test_a_scalar_is_a_box_of_one_element() -> None:
    """A 0-d tensor (Adam's step) has no dim to loop over, and is not empty."""
    scalar = Box.full(())

    assert scalar.num_elements == 1
    assert not scalar.is_empty
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == ()
    assert list(runs(scalar, scalar)) == [(0, 1)]
    assert flat_range((), 0, 1) == (scalar,)


def test_boxes_that_touch_share_nothing() -> None:
    """Half-open: the stop of one is the start of the next."""
    assert Box((0,), (4,)).intersect(Box((4,), (8,))) is None


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (Box((1, 0), (3, 4)), [(4, 12)]),
        (Box((0, 1), (3, 3)), [(1, 3), (5, 7), (9, 11)]),
        (Box((1, 1), (2, 3)), [(5, 7)]),
        (Box((1, 1), (1, 3)), []),
    ],
    ids=["rows", "columns", "part of a row", "empty"],
)
def test_runs_are_where_the_elements_lie(inner: Box, expected: list[tuple[int, int]]) -> None:
    """Reading by runs is reading by these ranges."""
    outer = Box.full((3, 4))

    assert list(runs(inner, outer)) == expected
    if expected:
        assert is_contiguous(inner, outer) == (len(expected) == 1)
        assert span(inner, outer) == (expected[0][0], expected[-1][1])


def test_a_flat_range_is_a_head_whole_rows_and_a_tail() -> None:
    """ZeRO cuts the flattened tensor anywhere; boxes must not grow with its size."""
    assert flat_range((1000, 10), 5, 9_993) == (
        Box((0, 5), (1, 10)),
        Box((1, 0), (999, 10)),
        Box((999, 0), (1000, 3)),
    )


def test_a_split_covers_what_parts_cannot_share_evenly() -> None:
    """10 rows on 4 ranks: FSDP gives the first ones more; on 12 ranks two get nothing."""
    box = Box.full((10, 2))

    assert [part.shape[0] for part in box.split(0, 4)] == [3, 3, 2, 2]
    assert [part.shape[0] for part in box.split(0, 12)] == [1] * 10 + [0] * 2
