"""Documents read as columns against the same read value by value: never a different answer."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT, empty_tensors, random_sharding, random_state, save
from ucp_core import _save, manifest
from ucp_core._json import load_json
from ucp_core._open import parts_of
from ucp_core._scan import scan
from ucp_core.boxes import Box
from ucp_core.checksums import crc32
from ucp_core.errors import CheckpointCorruptError, UcpError, UncoveredRegionError
from ucp_core.manifest import Manifest, from_bytes, merge, parse, to_bytes
from ucp_core.plan import Part, ReadPlan, plan
from ucp_core.statemap import TensorKey
from ucp_core.storage import MemoryStore

SEEDS = st.integers(0, 2**32)
DIRECTORY = f"{ROOT}/step-00000007"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small documents are read as large ones are, and fragments have several blocks."""
    monkeypatch.setattr(manifest, "_SCAN_BYTES_MIN", 0)
    monkeypatch.setattr(_save, "BLOCK_BYTES", 16)


def _saved(seed: int, world_size: int) -> list[bytes]:
    """Return the manifest of a random state, and the records behind it."""
    rng = random.Random(seed)
    state = random_state(rng)
    store = MemoryStore()
    sharding = random_sharding(rng, state, world_size)
    save(store, state, step=7, world_size=world_size, sharding=sharding)
    names = ["manifest.json", *(f"a0001-r{rank:05d}.json" for rank in range(world_size))]
    return [store.read(f"{DIRECTORY}/{name}") for name in names]


def _slowly(data: bytes) -> Manifest:
    try:
        return parse(load_json(data))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(str(error)) from error


def _sealed(body: bytes) -> bytes:
    return body + b',"crc32":"%08x"}\n' % crc32(body)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 5))
def test_both_ways_read_the_same(seed: int, world_size: int) -> None:
    """Tensors of all sorts, in grids and flat ranges; 0-d, empty, and of several dims at once."""
    data, *records = _saved(seed, world_size)
    for text in (data, *records):
        found = scan(text)
        assert found is not None, "our own writer's form"
        assert from_bytes(text) == _slowly(text)
        assert to_bytes(from_bytes(text)) == text
    assert merge([from_bytes(text) for text in records]) == merge(list(map(_slowly, records)))


@settings(deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 5))
def test_both_ways_plan_the_same(seed: int, saved_by: int, loaded_by: int) -> None:
    """Of tensors that are cut into ranges, and of those that are cut otherwise."""
    data, *_ = _saved(seed, saved_by)
    state = random_state(random.Random(seed))
    for held in random_sharding(random.Random(seed + 1), state, loaded_by):
        need = parts_of(empty_tensors(state, held))
        assert _plan(need, from_bytes(data)) == _plan(need, _slowly(data))


def _plan(need: list[Part], source: Manifest) -> ReadPlan:
    return plan(need, [source.state_map], span_bytes_max=64, direct_bytes_max=48, gap_bytes_max=8)


@settings(deadline=None)
@given(SEEDS, st.data())
def test_what_is_wrong_is_told_as_ever(seed: int, data: st.DataObject) -> None:
    """Text that was changed and sealed again: what one way refuses, the other refuses alike.

    Numbers are changed most, because the form of the text is all that columns are told from.
    """
    (text, *_) = _saved(seed, 2)
    body = text[:-21]
    for _ in range(data.draw(st.integers(1, 3))):
        places = [match.span() for match in re.finditer(rb"\d+|\D{1,8}", body)]
        low, high = data.draw(st.sampled_from(places))
        piece = data.draw(st.sampled_from(_PIECES) | st.just(body[slice(*places[-1])]))
        body = body[:low] + piece + body[high:]
    text = _sealed(body)

    try:
        expected: Manifest | str = _slowly(text)
    except UcpError as error:
        expected = type(error).__name__
    try:
        found: Manifest | str = from_bytes(text)
    except UcpError as error:
        found = type(error).__name__
    assert found == expected


_PIECES = (
    b"", b"0", b"1", b"00", b"01", b"16", b"-1", b"1e1", b"1.0", b"4294967296", b"9" * 18,
    b"1152921504606846977", b"9" * 30, b'"', b"[", b"]", b"{", b"}", b",", b":", b" ", b"NaN",
    b"[]", b"null", b',"fragments":[', b',"fragments":[]', b',"fragments":NaN', b"fragments",
    b',"param_groups":[', b'"replica":true', b"}]", b"\\", b"\xff", b'"a0001-r00001.bin"',
    b'"crc33"',
)  # fmt: skip


def test_a_box_that_reaches_out_of_its_tensor_is_not_found() -> None:
    """Positions count from the first element: beside a tensor lies the next one."""
    data, *_ = _saved(3, 2)
    source = from_bytes(data)
    key, entry = next((k, e) for k, e in source.state_map.entries.items() if e.num_bytes)
    ndim = len(entry.shape)
    out = Box(entry.shape, tuple(extent + 1 for extent in entry.shape))
    assert ndim, "a tensor with dims"

    with pytest.raises(UncoveredRegionError, match="is in no file"):
        _plan([Part(key, entry.dtype, entry.shape, out)], source)


def test_a_tensor_that_nobody_saved_is_named() -> None:
    """In a table as in any map."""
    data, *_ = _saved(3, 2)
    with pytest.raises(UncoveredRegionError, match="is not in the checkpoint"):
        _plan([Part(TensorKey("x", "y"), "F32", (1,), Box.full((1,)))], from_bytes(data))
