"""Patterns in numbers: what does not fit is told with tensor, rank and numbers."""

import re
from typing import Any

import pytest

from ucp_core.errors import PatternError, UnsupportedVersionError
from ucp_core.geometry import Box
from ucp_core.language import (
    Affine,
    Average,
    Cut,
    Grid,
    Pattern,
    Replicated,
    ShardPiece,
    Unique,
    parse_affine_map,
    place,
    split,
)
from ucp_core.language.affine import BOXES_MAX, AffinePiece


def test_one_rank_holds_fused_parts_as_they_are() -> None:
    """Without a cut there is one piece, however many experts are fused."""
    [pieces] = place(Cut(0, parts=64), [(128, 3)]).pieces

    assert pieces == (ShardPiece(Box((0, 0), (128, 3)), (0, 0)),)


@pytest.mark.parametrize(
    ("pattern", "shards", "problem"),
    [
        (Unique(), [], "w: no rank holds a shard of it"),
        (Unique(), [(2,), (2,)], "w: declared unique, but 2 ranks hold a shard of it: [2], [2]"),
        (Replicated(), [(2, 3), (3, 2)], "w: declared replicated, but rank 1 holds [3, 2] and"),
        (Average(), [(2,), (3,)], "w: declared to be averaged, but rank 1 holds [3]"),
        (Replicated("often"), [(2,)], "w: check is 'often', must be equal or first"),  # type: ignore[arg-type]
        (Cut(2), [(2, 3)], "w: cut along dim 2, but its shards have 2 dims"),
        (Cut(0), [()], "w: cut along dim 0, but its shards have 0 dims"),
        (
            Cut(0),
            [(2, 3), (2,)],
            "w: rank 1 holds [2], but rank 0 holds [2, 3]: the numbers of dims",
        ),
        (Cut(0), [(2, 3), (2, 4)], "cut along dim 0, but rank 1 holds [2, 4] and rank 0 [2, 3]"),
        (Cut(0, widths=(2, 3)), [(2,), (2,)], "w: rank 1 holds 2 along dim 0, the pattern says 3"),
        (Cut(0, widths=(2,)), [(1,), (1,)], "widths are given for 1 ranks, 2 ranks hold it"),
        (Cut(0, widths=()), [(1,)], "w: a list is empty"),
        (Cut(0, widths=(-1,)), [(1,)], "w: extents must not be negative"),
        (
            Cut(0, parts=(4, 3)),
            [(3,), (4,)],
            "w: a part of 3 cannot be divided evenly over 2 ranks",
        ),
        (Cut(0, parts=(4, 4)), [(3,), (3,)], "the parts 4, 4 add up to 8, the shards to 6"),
        (Cut(0, ratio=(2, 1)), [(4,), (4,)], "8 elements along dim 0 cannot be divided into parts"),
        (Cut(0, parts=0), [(4,)], "w: parts and ratio must be at least 1"),
        (Cut(0, parts=2, part_widths=((1,),)), [(1,)], "part_widths has 1 parts, parts has 2"),
        (
            Cut(0, part_widths=((22, 22), (22, 21))),
            [(44,), (44,)],
            "w: rank 1 holds 44 along dim 0, the pattern says 22 + 21 = 43",
        ),
        (Cut(0, widths=(1,), part_widths=((1,),)), [(1,)], "part_widths and widths exclude"),
        (Cut(0, unpadded=9), [(4,), (4,)], "unpadded is 9, but the shards 4, 4 add up to only 8"),
        (Grid((Cut(0), Cut(1)), (2, 2)), [(1, 1)] * 3, "a grid of 2 x 2 ranks does not fit 3"),
        (Grid((Cut(0), Cut(1)), (2, 0)), [(1, 1)] * 3, "a grid of 2 x 0 ranks does not fit 3"),
        (Grid((Cut(0), Cut(-2)), (2, 1)), [(1, 1)] * 2, "w: two cuts along dim 0"),
        (
            Grid((Cut(0), Cut(1)), (2, 2)),
            [(1, 2), (1, 3), (1, 2), (1, 2)],
            "rank 3 holds [1, 2], but other ranks at place 1 of grid axis 1 have 3 along dim 1",
        ),
    ],
)
def test_shards_that_do_not_fit_are_told_in_numbers(
    pattern: Pattern, shards: list[tuple[int, ...]], problem: str
) -> None:
    """A pattern that fits by luck puts elements into the wrong place."""
    with pytest.raises(PatternError, match=re.escape(problem)):
        place(pattern, shards, name="w")


def test_the_rank_is_a_fact_of_the_error() -> None:
    """Programs look there, people at the message."""
    with pytest.raises(PatternError) as caught:
        place(Cut(0, widths=(2, 3)), [(2,), (2,)], name="layers.0.w (exp_avg)")

    assert caught.value.facts == {"name": "layers.0.w (exp_avg)", "rank": 1}


def test_a_target_is_cut_as_torch_cuts() -> None:
    """The last ranks get less or nothing; a padded vocabulary gets padding instead."""
    assert split(Cut(0), (5, 2), 4).shards == ((2, 2), (2, 2), (1, 2), (0, 2))
    assert split(Cut(0, unpadded=5), (5, 2), 4).shards == ((2, 2),) * 4
    assert split(Cut(0, widths=(4, 1)), (5, 2), 2).shards == ((4, 2), (1, 2))
    assert split(Cut(0, widths=(4, 1)), (6, 2), 2).shards == ((3, 2), (3, 2))
    grid = split(Grid((Cut(0), Cut(1, ratio=(1, 1))), (2, 0)), (3, 4), 4)
    assert grid.shards == ((2, 2), (2, 2), (1, 2), (1, 2))
    assert grid.pieces[3] == (
        ShardPiece(Box((0, 0), (1, 1)), (2, 1)),
        ShardPiece(Box((0, 1), (1, 2)), (2, 3)),
    )


def test_uneven_parts_are_kept_for_the_ranks_they_were_given_for() -> None:
    """For another number of ranks they have to be even."""
    cut = Cut(0, part_widths=((6, 2), (2, 2)))

    assert split(cut, (12,), 2).shards == ((8,), (4,))
    assert split(cut, (12,), 4).shards == ((3,),) * 4
    with pytest.raises(PatternError, match="a part of 8 cannot be divided evenly over 3 ranks"):
        split(cut, (12,), 3)


def _map(pieces: list[dict[str, Any]], shape: list[int], shard: list[int]) -> Affine:
    ranks = {str(rank): {"shard_shape": shard, "pieces": [p]} for rank, p in enumerate(pieces)}
    params = {"w": {"logical_shape": shape, "ranks": ranks}}
    return parse_affine_map({"version": 1, "params": params}, where="model_states")["w"]


def _piece(shape: list[int], source: list[Any], dest: list[Any], *at: int) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": list(at)}


def test_maps_of_row_and_column_parallel_layers_are_one_box_a_rank() -> None:
    """As DeepSpeed's AutoTP writes them for down_proj and up_proj."""
    down = _map(
        [_piece([32, 44], [44 * r, [88, 1]], [0, [44, 1]], r) for r in range(2)], [32, 88], [32, 44]
    )
    up = _map(
        [_piece([44, 32], [1408 * r, [32, 1]], [0, [32, 1]], r) for r in range(2)],
        [88, 32],
        [44, 32],
    )

    assert place(down, [(32, 44)] * 2) == place(Cut(1), [(32, 44)] * 2)
    assert place(up, [(44, 32)] * 2) == place(Cut(0), [(44, 32)] * 2)


def test_a_folded_or_strided_map_becomes_as_few_boxes_as_it_is_made_of() -> None:
    """One for each head where q and k of a head are neighbours; one where a view was folded."""
    heads = _map(
        [_piece([4, 2, 6], [r * 12, [24, 6, 1]], [0, [12, 6, 1]], r) for r in range(2)],
        [16, 6],
        [8, 6],
    )
    folded = _map([_piece([8, 2, 3], [0, [6, 3, 1]], [0, [6, 3, 1]], 0)], [6, 8], [6, 8])
    reordered = _map([_piece([8, 6], [0, [1, 8]], [0, [1, 8]], 0)], [6, 8], [6, 8])

    assert [len(pieces) for pieces in place(heads, [(8, 6)] * 2).pieces] == [4, 4]
    assert place(heads, [(8, 6)] * 2).pieces[1][1] == ShardPiece(Box((2, 0), (4, 6)), (6, 0))
    for one in (folded, reordered):
        assert place(one, [(6, 8)]).pieces == ((ShardPiece(Box((0, 0), (6, 8)), (0, 0)),),)


def test_a_transposed_shard_of_too_many_boxes_is_refused() -> None:
    """Rows are columns, so that every element is a box of its own."""
    size = BOXES_MAX
    large = _map([_piece([2, size], [0, [size, 1]], [0, [1, 2]], 0)], [2, size], [size, 2])
    with pytest.raises(PatternError, match=f"is not made of boxes .* more than {BOXES_MAX} would"):
        place(large, [(size, 2)])


def test_a_map_names_its_replicas() -> None:
    """The lowest rank of its locations is the primary, the others are compared with it."""
    pieces = [_piece([4], [0, [1]], [0, [1]], 0, 1) for _ in range(2)]

    placement = place(_map(pieces, [4], [4]), [(4,), (4,)])

    assert placement.relation == "replica"
    assert [[p.replica for p in mine] for mine in placement.pieces] == [[False], [True]]


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        (
            AffinePiece((4,), 0, (1,), 0, (1,), (0,), 0.5),
            "a piece is stored times 0.5; the optimizer's moments",
        ),
        (AffinePiece((4,), 0, (1,), 0, (1,), (1,)), "located on ranks [1] only"),
        (AffinePiece((4,), 0, (1, 1), 0, (1,), (0,)), "has 2 source and 1 destination strides"),
        (
            AffinePiece((4,), 2, (1,), 0, (1,), (0,)),
            "the tensor of shape [4] has 4 elements, but a",
        ),
        (AffinePiece((4,), 0, (1,), 0, (2,), (0,)), "reaches from 0 to 6 with strides [2]"),
    ],
)
def test_pieces_that_cannot_be_are_refused(piece: AffinePiece, problem: str) -> None:
    """The peer reads them as uninitialised memory, or as values scaled twice."""
    with pytest.raises(PatternError, match=re.escape(problem)):
        place(Affine((4,), ((4,),), ((piece,),)), [(4,)], name="w")


def test_a_map_for_other_shards_is_refused() -> None:
    """Its offsets would be read in a tensor of another width."""
    pieces = [_piece([4], [0, [1]], [0, [1]], 0)]
    affine = _map(pieces, [4], [4])

    with pytest.raises(PatternError, match=r"rank 0 holds \[5\], but the affine map says \[4\]"):
        place(affine, [(5,)])
    with pytest.raises(PatternError, match="is for 1 ranks, but 2 ranks hold a shard"):
        place(affine, [(4,), (4,)])
    with pytest.raises(PatternError, match=r"describes \[4\] on 1 ranks, but \[4\] on 2 is needed"):
        split(affine, (4,), 2)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (3, "x is not a mapping"),
        ({"version": 1}, "x: params is not a mapping"),
        ({"version": 1, "params": {"w": 3}}, "x: params['w']: not an affine map of version 1"),
        (
            {"version": 1, "params": {"w": {"logical_shape": [4], "ranks": {"1": {}}}}},
            "x: params['w']: ranks [1] are not 0 .. 0",
        ),
        (
            {"version": 1, "params": {"w": {"logical_shape": [-4], "ranks": {}}}},
            "a negative number in [-4]",
        ),
    ],
)
def test_a_broken_map_is_told(document: object, problem: str) -> None:
    """It comes out of a pickle, so anything may be there."""
    with pytest.raises(PatternError, match=re.escape(problem)):
        parse_affine_map(document, where="x")


def test_a_newer_map_is_not_guessed_at() -> None:
    """DeepSpeed moves this form apart from its checkpoint version."""
    with pytest.raises(UnsupportedVersionError, match="x has version 2, but this program reads 1"):
        parse_affine_map({"version": 2, "params": {}}, where="x")
