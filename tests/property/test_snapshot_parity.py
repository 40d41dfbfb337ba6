"""Parity against a plain model of GF(16), and every loss that it promises to survive."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.errors import ParityError
from workers.parity import code as parity
from workers.parity.code import BLOCK_BYTES, GROUP_MAX, P, Q

#: Around what the code cuts at: nothing, one byte, the grain of 64, a block, more than two.
LENGTHS = st.one_of(
    st.integers(0, 200),
    st.integers(BLOCK_BYTES - 70, BLOCK_BYTES + 70),
    st.integers(2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 5000),
)


def _members(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length, dtype=np.uint8) for length in lengths]


def _encoded(members: list[np.ndarray], num: int = 2) -> list[np.ndarray]:
    size = parity.parity_bytes([len(member) for member in members])
    out = [np.zeros(size, np.uint8) for _ in range(num)]
    for index, member in enumerate(members):
        parity.add(out, index, member)
    return out


def _model_q(members: list[np.ndarray], size: int) -> np.ndarray:
    """Return Q by multiplying polynomials: bit c of an element stands for packet c of a block."""
    out = np.zeros(size, np.uint8)
    for start in range(0, size, BLOCK_BYTES):
        packet = (min(size, start + BLOCK_BYTES) - start) // 4
        total = np.zeros((4, packet), np.uint8)
        for index, member in enumerate(members):
            padded = np.zeros(4 * packet, np.uint8)
            piece = member[start : start + 4 * packet]
            padded[: len(piece)] = piece
            rows = padded.reshape(4, packet).copy()
            for _ in range(index):
                # Times x: every packet moves up one; the one on top is x^4 = x + 1.
                rows = np.stack([rows[3], rows[0] ^ rows[3], rows[1], rows[2]])
            total ^= rows
        out[start : start + 4 * packet] = total.reshape(-1)
    return out


@settings(deadline=None, max_examples=40)
@given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(0, 9))
def test_the_parities_are_the_sum_and_the_weighted_sum(lengths: list[int], seed: int) -> None:
    """A parity that only its own decoder understands could be wrong in both."""
    members = _members(lengths, seed)
    p, q = _encoded(members)

    expected = np.zeros_like(p)
    for member in members:
        expected[: len(member)] ^= member
    assert np.array_equal(p, expected)
    assert np.array_equal(q, _model_q(members, len(q)))


@pytest.mark.parametrize("num_members", range(1, GROUP_MAX + 1))
def test_every_double_loss_is_rebuilt_in_groups_of_every_size(num_members: int) -> None:
    """Parities included. One pair of exponents whose sum is not invertible would lose data."""
    members = _members([1000 + 37 * (index % 3) for index in range(num_members)], num_members)
    encoded = dict(enumerate(_encoded(members)))
    everybody = [*range(num_members), "p", "q"]
    for lost in combinations(everybody, 2):
        left = {which: encoded[which] for which, name in ((P, "p"), (Q, "q")) if name not in lost}
        missing = [index for index in range(num_members) if index in lost]
        present = {index: members[index] for index in range(num_members) if index not in missing}
        targets = [np.full(len(members[index]), 0x11, np.uint8) for index in missing]

        parity.rebuild(present, left, missing, targets)

        for index, target in zip(missing, targets, strict=True):
            assert np.array_equal(target, members[index]), lost
        whole = present | dict(zip(missing, targets, strict=True))
        renewed = {which: np.zeros_like(encoded[which]) for which in (P, Q) if which not in left}
        for index, member in whole.items() if renewed else ():
            parity.add(renewed, index, member)
        for which, again in renewed.items():
            assert np.array_equal(again, encoded[which]), lost


@settings(deadline=None, max_examples=40)
@given(st.lists(LENGTHS, min_size=2, max_size=4), st.data())
def test_lost_members_of_any_lengths_come_back(lengths: list[int], data: st.DataObject) -> None:
    """The shortest, the longest and the empty one, in either order of asking."""
    members = _members(lengths)
    encoded = _encoded(members)
    indexes = st.integers(0, len(members) - 1)
    missing = data.draw(st.lists(indexes, min_size=1, max_size=2, unique=True))
    present = {i: member for i, member in enumerate(members) if i not in missing and len(member)}
    targets = [np.empty(len(members[index]), np.uint8) for index in missing]

    parity.rebuild(present, encoded, missing, targets)

    for index, target in zip(missing, targets, strict=True):
        assert np.array_equal(target, members[index])


@settings(deadline=None, max_examples=40)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 2), st.randoms())
def test_pieces_add_up_to_the_parity_of_the_whole(
    lengths: list[int], num_parities: int, rng: random.Random
) -> None:
    """A keeper folds streams of several peers in as they come: any cuts, any order."""
    members = _members(lengths)
    expected = _encoded(members, num_parities)
    pieces = []
    for index, member in enumerate(members):
        cuts = sorted({0, len(member), *(rng.randint(0, len(member)) for _ in range(3))})
        pieces += [(index, low, high) for low, high in pairwise(cuts)]
    rng.shuffle(pieces)

    folded = [np.zeros_like(target) for target in expected]
    for index, low, high in pieces:
        parity.add(folded, index, members[index][low:high].tobytes(), low)

    for got, whole in zip(folded, expected, strict=True):
        assert np.array_equal(got, whole)


def test_adding_what_changed_updates_the_parity() -> None:
    """Re-encoding the whole group for one member's new version would read all of it."""
    members = _members([70_000, 65_000, 70_001])
    encoded = _encoded(members)
    new = _members([65_000], seed=5)[0]
    parity.add(encoded, 1, members[1] ^ new)

    for got, whole in zip(encoded, _encoded([members[0], new, members[2]]), strict=True):
        assert np.array_equal(got, whole)


def test_windows_of_whole_blocks_are_rebuilt_by_themselves() -> None:
    """A reader of one box of a lost file need not fetch the group's files as a whole."""
    size = 3 * BLOCK_BYTES + 1000
    members = _members([size, size - 300, size - BLOCK_BYTES])
    encoded = _encoded(members)
    for low, high in ((BLOCK_BYTES, 3 * BLOCK_BYTES), (2 * BLOCK_BYTES, len(encoded[0]))):
        targets = [np.empty(len(members[index][low:high]), np.uint8) for index in (0, 2)]
        parity.rebuild(
            {1: members[1][low:high]}, [part[low:high] for part in encoded], [0, 2], targets
        )
        assert np.array_equal(targets[0], members[0][low:high])
        assert np.array_equal(targets[1], members[2][low:high])


def test_more_losses_than_parities_are_refused() -> None:
    """Whatever came out would be plausible garbage."""
    members = _members([100, 100, 100])
    p, q = _encoded(members)
    targets = [np.empty(100, np.uint8) for _ in range(3)]
    with pytest.raises(ParityError, match="1 of its parities are left"):
        parity.rebuild({2: members[2]}, [p], [0, 1], targets[:2])
    with pytest.raises(ParityError, match="take another source"):
        parity.rebuild({}, [p, q], [0, 1, 2], targets)


def test_what_does_not_fit_is_refused_and_not_cut() -> None:
    """A member longer than its parity would silently be protected only in part."""
    p, q = np.zeros(64, np.uint8), np.zeros(128, np.uint8)
    with pytest.raises(ParityError, match="member 1 has 65 bytes, its parity 64"):
        parity.add([p], 1, bytes(65))
    with pytest.raises(ParityError, match="member 15: double parity has members 0 to 14"):
        parity.add([p, np.zeros(64, np.uint8)], 15, bytes(1))
    with pytest.raises(ParityError, match="of equal length"):
        parity.add([p, q], 0, bytes(64))
    with pytest.raises(ParityError, match="take parity_bytes"):
        parity.add([np.zeros(60, np.uint8)], 0, bytes(60))
    with pytest.raises(ParityError, match="begin at -1"):
        parity.add([p], 0, bytes(1), -1)
