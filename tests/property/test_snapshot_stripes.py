"""Groups of every size lose every set of nodes that they are said to survive."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stripes import rebuild_shares
from workers.errors import ParityError
from workers.parity import Stripes
from workers.parity import code as parity


def _bytes(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def _blocks(stripes: Stripes) -> list[np.ndarray]:
    return [np.zeros(stripes.block_bytes, np.uint8) for _ in range(stripes.tolerance)]


def _losses(num_nodes: int, num_parities: int) -> list[tuple[int, ...]]:
    counts = range(num_parities + 1)
    return [lost for count in counts for lost in combinations(range(num_nodes), count)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 700), min_size=2, max_size=8), st.integers(1, 2))
def test_unequal_parts_survive_every_loss(lengths: list[int], num_parities: int) -> None:
    """Ranks of uneven sharding differ in size, and a rank may hold nothing of a class at all."""
    if len(lengths) <= num_parities:
        lengths = [*lengths, 99]
    parts = [_bytes(length, seed) for seed, length in enumerate(lengths)]
    stripes = Stripes.of_parts(lengths, tolerance=num_parities)
    parities = {node: _blocks(stripes) for node in range(len(parts))}
    sent = dict.fromkeys(parities, 0)
    for node, part in enumerate(parts):
        for piece in stripes.blocks(node, len(part)):
            for which, holder in enumerate(piece.holders):
                assert holder != node
                target = {which: parities[holder][which]}
                parity.add(target, piece.index, part[piece.start : piece.stop].tobytes())
                sent[node] += piece.stop - piece.start
    # A partner copy for each loss sends as much; what parity saves is memory.
    assert sent == {node: num_parities * len(part) for node, part in enumerate(parts)}

    for lost in _losses(len(parts), num_parities):
        left = [node for node in range(len(parts)) if node not in lost]
        targets = {node: np.full(len(parts[node]), 0x55, np.uint8) for node in lost}
        rebuild_shares(
            stripes,
            {node: parts[node] for node in left},
            {node: parities[node] for node in left},
            targets,
        )
        for node, got in targets.items():
            assert np.array_equal(got, parts[node]), lost


@pytest.mark.parametrize(("num_nodes", "num_parities"), [(2, 1), (4, 1), (8, 1), (4, 2), (9, 2)])
def test_a_node_stores_one_part_in_n_less_the_losses(num_nodes: int, num_parities: int) -> None:
    """S / (n - m), parity included: with n = 4 and one loss a third, not the half of a pair."""
    length = 1 << 20
    lengths = [-(-length // num_nodes)] * num_nodes
    stripes = Stripes.of_parts(lengths, tolerance=num_parities)
    stored = num_nodes * stripes.block_bytes
    assert length / (num_nodes - num_parities) <= stored < length / (num_nodes - num_parities) + 999
    assert [len(stripes.parities_of(node)) for node in range(num_nodes)] == (
        [num_parities] * num_nodes
    )


def test_one_loss_more_is_refused() -> None:
    """There is no such thing as a state of which most is right."""
    stripes = Stripes.of_parts([500, 500, 500], tolerance=1)
    targets = {node: np.empty(500, np.uint8) for node in (0, 2)}
    with pytest.raises(ParityError, match="are lost and"):
        rebuild_shares(stripes, {1: _bytes(500)}, {1: _blocks(stripes)}, targets)


@pytest.mark.parametrize(("num_nodes", "num_parities"), [(1, 1), (2, 2), (5, 3), (18, 2)])
def test_groups_that_cannot_be_protected_are_refused(num_nodes: int, num_parities: int) -> None:
    """A group of 18 with two parities has 16 members, and the powers repeat after 15."""
    with pytest.raises(ParityError, match=f"group of {num_nodes} nodes"):
        Stripes.of_parts([1000] * num_nodes, tolerance=num_parities)
