"""Headers from anybody: refused by our own errors or read exactly, and nothing else happens."""

import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ucp_core.errors import UcpError
from ucp_core.formats import print_header
from ucp_core.formats.huggingface import reader as huggingface
from ucp_core.formats.safetensors_header import parse_header
from ucp_core.storage import MemoryStore

PATH = "m/model.safetensors"

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**60, 2**63, 2**64 - 1, 10**40, -(2**63)]),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["F32", "BF16", "I64", "BOOL", "F4", "__metadata__"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
_TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "I16"]) | _VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | _VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _VALUES,
    }
)
_HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "", "__metadata__", "a.b"]), _TENSORS | _VALUES, max_size=3
)


def _write(data: bytes) -> MemoryStore:
    store = MemoryStore()
    store.write_atomic(PATH, data, fsync=False)
    return store


def _accepts(text: bytes, data: bytes) -> bool:
    """Return whether our reader takes the file; only our own errors may come."""
    try:
        huggingface.read(_write(len(text).to_bytes(8, "little") + text + data), "m")
    except UcpError:
        return False
    return True


@given(header=_HEADERS, data=st.binary(max_size=40))
def test_what_we_accept_the_reference_accepts(header: dict[str, Any], data: bytes) -> None:
    """A reader that is more lenient than the others shows a file that they cannot load."""
    text = json.dumps(header).encode()

    if _accepts(text, data):
        blob = len(text).to_bytes(8, "little") + text + data
        names = [name for name, _ in safetensors.deserialize(blob)]
        assert sorted(names) == sorted(set(header) - {"__metadata__"})


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 400), flip=st.integers(0, 400))
def test_a_damaged_header_never_shows_bytes_outside_the_file(
    seed: int, cut: int, flip: int
) -> None:
    """Random text hardly reaches the checks behind the JSON; a real header with one fault does."""
    rng = random.Random(seed)
    arrays = {f"t{i}": np.zeros(rng.randint(0, 5), np.float32) for i in range(3)}
    blob = bytearray(safetensors.numpy.save(arrays))
    blob[flip % len(blob)] ^= 1 << rng.randrange(8)
    blob = blob[: len(blob) - cut] if cut < len(blob) // 2 else blob
    try:
        opened = huggingface.read(_write(bytes(blob)), "m")
    except UcpError:
        return
    for entry in opened.state_map.entries.values():
        fragment = entry.fragments[0]
        assert fragment.offset_bytes >= 8
        assert fragment.offset_bytes + fragment.num_bytes <= len(blob)


@given(
    index=st.fixed_dictionaries(
        {
            "weight_map": st.dictionaries(
                st.sampled_from(["a", "b", ""]),
                st.sampled_from(["model.safetensors", "../x", "", "none.safetensors"]) | _VALUES,
            )
            | _VALUES
        }
    )
    | _VALUES,
    config=_VALUES,
)
def test_no_index_and_no_configuration_crashes_the_reader(index: Any, config: Any) -> None:
    """Both are somebody else's JSON, and name files."""
    store = _write(safetensors.numpy.save({"a": np.zeros(2, np.float32)}))
    texts = {"model.safetensors.index.json": index, "config.json": config, "x.json": index}
    for name, value in texts.items():
        store.write_atomic(f"m/{name}", json.dumps(value).encode(), fsync=False)

    try:
        opened = huggingface.read(store, "m")
    except UcpError:
        return
    assert [key.fqn for key in opened.state_map.entries] == ["a"]


@given(data=st.binary(max_size=200))
def test_no_bytes_at_all_crash_the_reader(data: bytes) -> None:
    """The first eight of them are a length."""
    with pytest.raises(UcpError, match=r"m/model\.safetensors"):
        huggingface.read(_write(b"\xff" + data), "m")
    with contextlib.suppress(UcpError):
        huggingface.read(_write(data), "m")


@given(
    names=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), unique=True, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_a_printed_header_is_what_the_reference_prints_and_reads(
    names: list[str], seed: int
) -> None:
    """Quotes, line ends and names of no letters."""
    rng = random.Random(seed)
    names = [name for name in names if name != "__metadata__"]
    arrays = {n: np.arange(rng.randint(0, 4), dtype=np.int16).reshape(1, -1) for n in names}
    header = print_header([(n, "I16", a.shape) for n, a in arrays.items()], {"format": "pt"})
    blob = header + b"".join(a.tobytes() for a in arrays.values())

    loaded = safetensors.numpy.load(blob)

    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    size = sum(a.nbytes for a in arrays.values())
    assert {t.name for t in parse_header(header[8:], size, "x").tensors} == arrays.keys()
