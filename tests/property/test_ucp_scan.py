"""Documents read as columns against the same read value by value: never a different answer."""

import random
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT, empty_tensors, random_sharding, random_state, save
from ucp_core.errors import CheckpointCorruptError, UcpError, UncoveredRegionError
from ucp_core.geometry import Box, TensorKey
from ucp_core.manifest import Manifest, from_bytes, merge, to_bytes
from ucp_core.manifest import document as manifest
from ucp_core.manifest.document import parse
from ucp_core.manifest.fragment_columns import scan
from ucp_core.manifest.validation import load_json
from ucp_core.native import saving as _save
from ucp_core.native.opening import parts_of
from ucp_core.numerics import crc32
from ucp_core.reading import Part, ReadPlan, plan
from ucp_core.storage import MemoryStore

SEEDS = st.integers(0, 2**32)
DIRECTORY = f"{ROOT}/step-00000007"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small documents are read as large ones are, and fragments have several blocks."""
    monkeypatch.setattr(manifest, "_MANIFEST_COLUMNS_BYTES_MIN", 0)
    monkeypatch.setattr(manifest, "_RECORD_COLUMNS_BYTES_MIN", 0)
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


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=50)
@given(SEEDS, st.integers(1, 5), st.integers(1, 5))
def test_both_ways_plan_the_same(seed: int, saved_by: int, loaded_by: int) -> None:
    """For tensors that are cut into ranges, and for others."""
    data, *_ = _saved(seed, saved_by)
    state = random_state(random.Random(seed))
    for held in random_sharding(random.Random(seed + 1), state, loaded_by):
        need = parts_of(empty_tensors(state, held))
        assert _plan(need, from_bytes(data)) == _plan(need, _slowly(data))


def _plan(need: list[Part], source: Manifest) -> ReadPlan:
    return plan(need, [source.state_map], span_bytes_max=64, direct_bytes_max=48, gap_bytes_max=8)


@settings(deadline=None)
@given(SEEDS, st.data())
def test_both_ways_refuse_the_same(seed: int, data: st.DataObject) -> None:
    """Text that was changed and sealed again: what one way refuses, the other refuses alike.

    Numbers are changed most, because the form of the text is all that columns are told from.
    """
    (text, *_) = _saved(seed, 2)
    if data.draw(st.booleans()):
        # A text that was read before is recognised by its form.
        from_bytes(text)
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


_ENTRY = '"shape":[6,4],"slots":{"weight":{"dtype":"F32","fragments":[%s]}}'
_PLACE = '"file":"a0001-r0000%d.bin","offset":0,"nbytes":48,"crc32":%d,"blocks":%s'
_FRAGMENTS = (
    '{"box":[[0,3],[0,4]],%s}' % (_PLACE % (0, 7, "[1,2,3]")),
    '{"box":[[3,6],[0,4]],%s}' % (_PLACE % (1, 8, "[4,5,6]")),
)
_DOCUMENT = (
    '{"format":"everstep-distributed","version":1,"step":7,"attempt":1,"block_bytes":16,'
    '"tensors":{"w":{%s}},"param_groups":[],"extra":{},'
    '"files":{"a0001-r00000.bin":{"nbytes":48,"crc32":0},'
    '"a0001-r00001.bin":{"nbytes":48,"crc32":0}},"source":{},"world_size":2'
) % (_ENTRY % ",".join(_FRAGMENTS))


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "read before"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"crc32":8', '"crc33":8'),
        ('"crc32":8', '"crc32":08'),
        ('"crc32":8', '"crc32":4294967296'),
        ("[4,5,6]", "[4,4294967296,6]"),
        ("[4,5,6]", "[4,5]"),
        ("[[3,6]", "[[3,7]"),
        ("[[3,6]", "[[6,3]"),
        ("[[3,6]", "[[3,5]"),
        ('"nbytes":48,"crc32":8', '"nbytes":44,"crc32":8'),
        ('"offset":0,"nbytes":48,"crc32":8', '"offset":1,"nbytes":48,"crc32":8'),
        ('"file":"a0001-r00001.bin"', '"file":"a0001-r00002.bin"'),
        ('"file":"a0001-r00001.bin"', '"file":"a0001-r0001.bin"'),
        ('"file":"a0001-r00001.bin"', '"file":"a0001-r000001.bin"'),
        ('"file":"a0001-r00001.bin"', '"file":"../0001-r00001.bin"'),
        ('"shape":[6,4]', '"shape":[5,4]'),
        ('"dtype":"F32"', '"dtype":"F33"'),
        ('"dtype":"F32"', '"dtype":"F64"'),
        ('"block_bytes":16', '"block_bytes":0'),
        ('"w":{', '"w":{"shape":[6,4],'),
    ],
)
def test_every_number_is_checked(old: str, new: str, *, is_known: bool) -> None:
    """A text of the right form can still lead out of a file, a tensor or a list of checksums."""
    assert _DOCUMENT.count(old) >= 1
    if is_known:
        assert scan(_sealed(_DOCUMENT.encode())) is not None

    wrong = _sealed(_DOCUMENT.replace(old, new, 1).encode())

    assert scan(wrong) is None
    with pytest.raises(CheckpointCorruptError):
        from_bytes(wrong)


def test_fragments_out_of_order_are_read_otherwise() -> None:
    """Columns are searched as if they were in order; such a document is sound all the same."""
    turned = _DOCUMENT.replace(",".join(_FRAGMENTS), ",".join(reversed(_FRAGMENTS)))
    data = _sealed(turned.encode())

    assert scan(data) is None
    assert from_bytes(data) == from_bytes(_sealed(_DOCUMENT.encode()))


def test_a_rank_makes_objects_of_what_it_needs_only() -> None:
    """One rank needs a few of the fragments of a thousand ranks."""
    rows = 4096
    pieces = [
        f'{{"box":[[{row},{row + 1}]],"file":"a0001-r{row:05d}.bin","offset":0,"nbytes":4,'
        f'"crc32":1}}'
        for row in range(rows)
    ]
    entry = f'"shape":[{rows}],"slots":{{"weight":{{"dtype":"F32","fragments":[%s]}}}}'
    files = ",".join(f'"a0001-r{row:05d}.bin":{{"nbytes":4,"crc32":0}}' for row in range(rows))
    document = (
        '{"format":"everstep-distributed","version":1,"step":7,"attempt":1,"block_bytes":16,'
        f'"tensors":{{"w":{{{entry % ",".join(pieces)}}}}},"param_groups":[],"extra":{{}},'
        f'"files":{{{files}}},"source":{{}},"world_size":{rows}'
    )
    source = from_bytes(_sealed(document.encode()))
    need = [Part(TensorKey("w", "weight"), "F32", (rows,), Box((70,), (73,)))]

    tracemalloc.start()
    made = _plan(need, source)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [copy.fragment.box for copy in made.copies] == [
        Box((row,), (row + 1,)) for row in (70, 71, 72)
    ]
    # As objects, a fragment takes some 500 bytes; as columns, and what proves them sound, 200.
    assert peak_bytes < 250 * rows


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


def test_a_tensor_that_no_rank_saved_is_named() -> None:
    """In a table as in any map."""
    data, *_ = _saved(3, 2)
    with pytest.raises(UncoveredRegionError, match="is not in the checkpoint"):
        _plan([Part(TensorKey("x", "y"), "F32", (1,), Box.full((1,)))], from_bytes(data))
