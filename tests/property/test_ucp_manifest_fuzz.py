"""Manifests that damage or malice made: our errors, and nothing else, come out."""

import copy
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT, save, small_state
from tests.support.mutations import places
from ucp_core.conversion import convert
from ucp_core.errors import UcpError, UncoveredRegionError, UnsupportedVersionError
from ucp_core.manifest import Manifest, from_bytes, to_bytes, to_json
from ucp_core.manifest.document import parse, validate
from ucp_core.native import open_checkpoint
from ucp_core.numerics import crc32
from ucp_core.storage import MemoryStore

_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 62,
    10**400,
    1.5,
    "",
    "..",
    "/etc/passwd",
    "\ud800",
    "F32",
    [],
    [[]],
    {},
    {"": {}},
    [1 << 59, 1 << 59],
    [0, 1 << 60],
    "foreign",
    "everstep-rank-record",
)


def _documents() -> list[bytes]:
    store = MemoryStore()
    save(store, small_state(), step=7)
    native = open_checkpoint(store, f"{ROOT}/step-00000007")
    convert(native, store, "universal", memory_bytes=8 << 20, processes=1)
    universal = open_checkpoint(store, "universal")
    record = store.read(f"{ROOT}/step-00000007/a0001-r00001.json")
    return [to_bytes(native.manifest), to_bytes(universal.manifest), record]


DOCUMENTS = _documents()


def _sealed(document: Any) -> bytes:
    body = json.dumps(document).encode()[:-1]
    return body + b',"crc32":"%08x"}\n' % crc32(body)


def _read(data: bytes) -> Manifest | None:
    try:
        manifest = from_bytes(data, where="fuzzed")
    except UcpError as error:
        # A terminal has to be able to print it.
        str(error).encode()
        return None
    return manifest


@given(st.integers(0, 2), st.data())
def test_changed_bytes_are_noticed(which: int, data: st.DataObject) -> None:
    """The seal is checked before anything else, wherever the damage is."""
    document = bytearray(DOCUMENTS[which])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(document) - 1))
        document[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(document)))
    damaged = bytes(document[:cut])

    assert _read(damaged) is None or damaged == DOCUMENTS[which]


@given(st.binary(max_size=200))
def test_sealed_rubbish_is_refused(body: bytes) -> None:
    """A seal proves that the bytes are as they were written, not that they mean something."""
    assert _read(body + b',"crc32":"%08x"}\n' % crc32(body)) is None


@given(st.integers(0, 2), st.integers(0, 1 << 30), st.integers(1, 3))
def test_changed_trees_are_refused_or_harmless(which: int, seed: int, changes: int) -> None:
    """Every value of every field replaced, removed, moved or doubled; the seal is right.

    A refused one is refused with all its problems, each with its path. An accepted text must be a
    manifest that prints and reads back.
    """
    rng = random.Random(seed)
    document = json.loads(DOCUMENTS[which])
    del document["crc32"]
    for _ in range(changes):
        holder, key = rng.choice(places(document))
        act = rng.randrange(4)
        if act == 0:
            del holder[key]
        elif act == 1:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        elif act == 2:
            other, place = rng.choice(places(document))
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, dict):
            holder[rng.choice(("..", "a/b", "\udfff", "x" * 300, "fragments"))] = holder[key]

    manifest = _read(_sealed(document))
    problems = validate(document)

    assert all(problem.path and problem.message for problem in problems)
    if problems:
        assert manifest is None
        with pytest.raises(UcpError) as caught:
            parse(document)
        if not isinstance(caught.value, UnsupportedVersionError):
            assert caught.value.facts["problems"] == tuple(problems)
    if manifest is not None:
        assert to_json(from_bytes(to_bytes(manifest))) == to_json(manifest)
        with suppress(UncoveredRegionError):
            manifest.state_map.prove_coverage()


@given(
    st.integers(100, 200_000),
    st.sampled_from(["[", '{"a":']),
    st.sampled_from([b"step", b"tensors"]),
)
def test_deep_nesting_is_refused(depth: int, opening: str, member: bytes) -> None:
    """The parser must not run out of stack; sealed, so that it is reached."""
    body = b'{"format":"everstep-universal","%b":' % member + opening.encode() * depth
    closing = (b"]" if opening == "[" else b"}") * depth
    inner = b"" if opening == "[" else b"1"
    document = body + inner + closing
    assert _read(document + b',"crc32":"%08x"}\n' % crc32(document)) is None
