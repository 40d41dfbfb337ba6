"""Parts that no memory has, against the parts as they were: every byte, or an error."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.made import held_of
from tests.support.memory_versions import check_loads, make_state, write_version
from workers.errors import ParityError
from workers.memory import Arena, LocalPart, Part
from workers.parity import ParityRecord, Stripes, buffer_bytes, making, write
from workers.parity.code import BLOCK_BYTES
from workers.parity.rebuild import Group
from workers.protocol import Held, Member
from workers.snapshot.for_others import fold, folds

ATTEMPT, STEP = 3, 17


@dataclass(frozen=True)
class _BytesPart:
    """A part that is a bytes object: what was there, and nothing that may change."""

    held: Held
    data: bytes

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        for target in targets:
            stop = offset_bytes + len(target)
            assert stop <= len(self.data), "read beyond the part"
            target[:] = self.data[offset_bytes:stop]
            offset_bytes = stop


@dataclass(frozen=True)
class _NotingPart(_BytesPart):
    """One that notes in ``asked`` when it is read, among others."""

    asked: list[int] = field(default_factory=list)

    def fill(self, offset_bytes: int, targets: Sequence[memoryview]) -> None:
        self.asked.append(self.held.rank)
        super().fill(offset_bytes, targets)


def _held(
    rank: int, data_bytes: int, record_bytes: int, world_size: int = 9, step: int = STEP
) -> Held:
    return held_of(
        step,
        rank,
        attempt=ATTEMPT,
        world_size=world_size,
        data_bytes=data_bytes,
        record_bytes=record_bytes,
        buffer=2,
        sequence=8,
    )


def _part(rank: int, size: int, *, step: int = STEP) -> _BytesPart:
    record_bytes = min(size, 100)
    data = np.random.default_rng((rank, step)).bytes(size)
    return _BytesPart(_held(rank, size - record_bytes, record_bytes, step=step), data)


def _members(parts: Sequence[Part | None]) -> tuple[Member | None, ...]:
    return tuple(
        None
        if part is None
        else Member(
            rank=part.held.rank,
            data_bytes=part.held.data_bytes,
            record_bytes=part.held.record_bytes,
        )
        for part in parts
    )


def _parities(parts: Sequence[Part | None], num_parities: int) -> list[_BytesPart]:
    """Return every node's parity buffer; a node never needs its own part for it."""
    found = []
    lengths = [0 if p is None else p.held.data_bytes + p.held.record_bytes for p in parts]
    for place in range(len(parts)):
        record = ParityRecord(
            attempt=ATTEMPT,
            step=STEP,
            world_size=9,
            tolerance=num_parities,
            place=place,
            members=_members(parts),
        )
        body = bytearray(b"\xaa" * buffer_bytes(lengths, tolerance=num_parities))
        others = {i: part for i, part in enumerate(parts) if part is not None and i != place}
        data_bytes, record_bytes = write(record, others, memoryview(body))
        held = _held(-1, data_bytes, record_bytes)
        found.append(_BytesPart(held, bytes(body[: data_bytes + record_bytes])))
    return found


def _without(
    parts: Sequence[_BytesPart | None], parities: Sequence[_BytesPart], places: set[int]
) -> Group:
    return Group(
        [parity for place, parity in enumerate(parities) if place not in places],
        [part for i, part in enumerate(parts) if part is not None and i not in places],
    )


def _check(part: Part, original: _BytesPart, start: int, cuts: Sequence[int]) -> None:
    held = part.held
    assert (held.rank, held.attempt, held.step) == (original.held.rank, ATTEMPT, STEP)
    assert (held.data_bytes, held.record_bytes, held.world_size) == (
        original.held.data_bytes,
        original.held.record_bytes,
        original.held.world_size,
    )
    targets = [bytearray(cut) for cut in cuts]
    part.fill(start, [memoryview(target) for target in targets])
    assert b"".join(targets) == original.data[start : start + sum(cuts)]


@pytest.mark.parametrize("num_parities", [1, 2])
def test_parts_are_read_in_turns(num_parities: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is asked for nothing for 2 s, while a block of gigabytes comes from another, has
    its rank wait no longer: what is read next is written over, and of two parities none is made."""
    monkeypatch.setattr(making, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(making, "_TURN_BYTES", 2 * 4096)
    num_nodes, asked = 5, list[int]()
    size = 3 * (num_nodes - num_parities) * 2 * 4096
    parts = [
        _NotingPart(_held(rank, size - 100, 100), bytes(size), asked) for rank in range(num_nodes)
    ]
    _parities(parts, num_parities)

    turn = 2 * num_parities * (num_nodes - num_parities)
    assert len(asked) == 3 * turn * num_nodes
    for place in range(num_nodes):
        for index in range(3):
            low = (3 * place + index) * turn
            assert set(asked[low : low + turn]) == set(range(num_nodes)) - {place}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_nodes_are_lost_their_parts_are_read_as_they_were(data: st.DataObject) -> None:
    """Parts are unequal, some nodes have none, and their parities are lost with them."""
    num_parities = data.draw(st.sampled_from([1, 2]))
    num_nodes = data.draw(st.integers(num_parities + 1, 6))
    sizes = data.draw(
        st.lists(st.one_of(st.none(), st.integers(1, 5000)), min_size=num_nodes, max_size=num_nodes)
    )
    parts = [None if size is None else _part(rank, size) for rank, size in enumerate(sizes)]
    num_lost = data.draw(st.integers(1, num_parities))
    places = data.draw(st.sets(st.integers(0, num_nodes - 1), min_size=num_lost, max_size=num_lost))
    group = _without(parts, _parities(parts, num_parities), places)

    lost = group.lost()
    assert [part.held.rank for part in lost] == [
        place for place in sorted(places) if sizes[place] is not None
    ]
    for part in lost:
        original = parts[part.held.rank]
        assert original is not None
        size = len(original.data)
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        cut = data.draw(st.integers(0, stop - start))
        _check(part, original, start, [cut, 0, stop - start - cut])
        _check(part, original, 0, [size])


@pytest.mark.parametrize(("num_parities", "places"), [(1, {2}), (2, {0, 3}), (2, {1}), (2, {1, 2})])
def test_parts_of_many_windows_are_read_as_they_were(num_parities: int, places: set[int]) -> None:
    """Windows and blocks of double parity meet where neither a piece nor a read ends."""
    sizes = [14 * BLOCK_BYTES + 7, 29 * BLOCK_BYTES, 3, 20 * BLOCK_BYTES - 1]
    parts = [_part(rank, size) for rank, size in enumerate(sizes)]
    for part in _without(parts, _parities(parts, num_parities), places).lost():
        original = parts[part.held.rank]
        size = len(original.data)
        _check(part, original, 0, [size // 3, size - size // 3])
        start = min(size, 9 * BLOCK_BYTES + 11)
        _check(part, original, start, [size - start])


@pytest.mark.parametrize(("num_nodes", "num_parities"), [(2, 1), (3, 1), (5, 1), (4, 2), (9, 2)])
def test_a_node_keeps_what_the_others_part_costs_between_them(
    num_nodes: int, num_parities: int
) -> None:
    """With k nodes and m parities it takes m/(k-m) of a part, unlike a copy."""
    parts = [_part(rank, 60_000) for rank in range(num_nodes)]
    for parity in _parities(parts, num_parities):
        share = num_parities * 60_000 / (num_nodes - num_parities)
        assert 0 <= parity.held.data_bytes - share <= 64 * num_parities


@pytest.mark.parametrize(("num_nodes", "num_parities"), [(1, 1), (2, 2), (5, 3), (18, 2)])
def test_groups_that_cannot_be_protected_are_refused(num_nodes: int, num_parities: int) -> None:
    """A group of 18 with two parities has 16 members, and the powers repeat after 15."""
    with pytest.raises(ParityError, match=f"group of {num_nodes} nodes"):
        Stripes.of_parts([1000] * num_nodes, tolerance=num_parities)


def test_a_lost_parity_alone_is_no_loss() -> None:
    """The node had no part, or its part is held elsewhere too."""
    parts = [_part(rank, 1000) for rank in range(4)]
    parities = _parities(parts, 2)
    assert Group(parities[:1], parts).lost() == []
    (lost,) = Group([parities[1], parities[3], parities[0]], parts[:2] + parts[3:]).lost()
    _check(lost, parts[2], 0, [1000])


@pytest.mark.parametrize(("num_parities", "places"), [(1, {0, 2}), (2, {0, 1, 3})])
def test_more_losses_than_parities_are_refused(num_parities: int, places: set[int]) -> None:
    """The computed bytes would be no rank's state."""
    parts = [_part(rank, 1000 + rank) for rank in range(5)]
    group = _without(parts, _parities(parts, num_parities), places)
    with pytest.raises(ParityError, match="of a group of 5 are lost"):
        group.lost()


def test_parts_of_another_version_are_refused() -> None:
    """One step later the lengths are the same, and the bytes are not."""
    parts = [_part(rank, 1000) for rank in range(3)]
    parities = _parities(parts, 1)
    other = _part(1, 1000, step=STEP + 1)
    with pytest.raises(ParityError, match=r"rank 1 after step 18 .* \(3, 17\)"):
        Group(parities[:2], [parts[0], other])

    longer = _part(1, 1001)
    with pytest.raises(ParityError, match="is not covered by the parity"):
        Group(parities[:2], [parts[0], longer])


def test_parities_of_different_groups_are_refused() -> None:
    """A group was formed again in between, or one keeper was behind."""
    parts = [_part(rank, 1000) for rank in range(4)]
    first, second = _parities(parts[:3], 1), _parities(parts[1:], 1)
    with pytest.raises(ParityError, match="do not cover the same parts"):
        Group([first[0], second[1]], parts[:2])


@contextmanager
def _arenas(world_size: int) -> Iterator[list[Arena]]:
    arenas = [Arena.create(f"r{rank}", body_bytes=1 << 18) for rank in range(world_size)]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


def _version(arenas: Sequence[Arena], num_parities: int) -> tuple[list[LocalPart], list[Arena]]:
    """Return the parts of a real version, and an arena with each node's parities of it."""
    parts = [
        LocalPart(arena, write_version(arena, make_state(5), step=5, rank=rank, world_size=4))
        for rank, arena in enumerate(arenas)
    ]
    kept = []
    lengths = [part.held.data_bytes + part.held.record_bytes for part in parts]
    for place in range(len(parts)):
        size = buffer_bytes(lengths, tolerance=num_parities)
        arena = Arena.create("parity", body_bytes=size)
        arena.begin(0, attempt=1, step=5, rank=-1, world_size=4)
        record = ParityRecord(
            attempt=1,
            step=5,
            world_size=4,
            tolerance=num_parities,
            place=place,
            members=_members(parts),
        )
        others: Mapping[int, Part] = {i: p for i, p in enumerate(parts) if i != place}
        data_bytes, record_bytes = write(record, others, arena.body(0))
        arena.finish(0, data_bytes=data_bytes, record_bytes=record_bytes)
        kept.append(arena)
    return parts, kept


def _local(arena: Arena) -> LocalPart:
    (held,) = arena.versions()
    return LocalPart(arena, held)


@pytest.mark.parametrize(("num_parities", "places"), [(1, {0}), (1, {3}), (2, {1, 2}), (2, {0, 3})])
def test_a_version_loads_without_the_lost_nodes(num_parities: int, places: set[int]) -> None:
    """Under another number of ranks, too: parity is a source like any other."""
    with _arenas(4) as arenas:
        parts, kept = _version(arenas, num_parities)
        present = [part for part in parts if part.held.rank not in places]
        group = Group([_local(kept[i]) for i in range(4) if i not in places], present)
        found: list[Part] = [*present, *group.lost()]
        by_rank = {part.held.rank: part for part in found}
        check_loads(dict(sorted(by_rank.items())), make_state(5), world_size=3)
        for arena in kept:
            arena.close()


@given(
    st.lists(st.lists(st.integers(0, 300), max_size=6), min_size=3, max_size=6),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
)
def test_what_replicas_fold_is_the_parity_of_their_shares(
    sizes: list[list[int]], window_bytes: int, seed: int
) -> None:
    """Any sizes of tensors and lengths of shares, cut anywhere, into memory that was used."""
    rng = np.random.default_rng(seed)
    shares = [[rng.integers(0, 256, size, np.uint8) for size in share] for share in sizes]
    flat = [np.concatenate([*share, np.empty(0, np.uint8)]) for share in shares]
    stripes = Stripes.of_parts([len(share) for share in flat], tolerance=1)
    parts = [
        _BytesPart(_held(rank, len(share), 0), share.tobytes()) if len(share) else None
        for rank, share in enumerate(flat)
    ]
    for place, expected in enumerate(_parities(parts, 1)):
        others = {other: share for other, share in enumerate(shares) if other != place}
        block = rng.integers(0, 256, stripes.block_bytes, np.uint8)
        for (start, stop), sources in folds(stripes, place, others, window_bytes):
            assert stop - start <= window_bytes
            fold(block[start:stop], sources)
        assert block.tobytes() == expected.data[: stripes.block_bytes]
        tensor = torch.empty(stripes.block_bytes, dtype=torch.uint8)
        as_tensors = {at: list(map(torch.from_numpy, share)) for at, share in others.items()}
        for (start, stop), found in folds(stripes, place, as_tensors, stripes.block_bytes or 1):
            fold(tensor[start:stop], found)
        assert np.array_equal(tensor.numpy(), block)
