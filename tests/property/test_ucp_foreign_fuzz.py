"""Foreign files that damage or malice made: our errors come out, nothing else, nothing runs."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.dcp_files import Save, write
from tests.support.hostile_pickles import dumps, torch_zip
from tests.support.megatron_files import state, write_checkpoint
from ucp_core.errors import UcpError
from ucp_core.formats.dcp import reader as dcp
from ucp_core.formats.megatron_core import reader as megatron_core
from ucp_core.native import Checkpoint
from ucp_core.storage import MemoryStore
from ucp_core.torch_files import as_json, read_pickle, read_torch_file, reading_within

#: Ten thousand values.
_MEMORY_BYTES = 2 << 20


def _torch_file() -> bytes:
    out = io.BytesIO()
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": base, "b": base.t(), "c": [1, "x", 2.5, (None, True)], "d": {3: b"y"}}, out)
    return out.getvalue()


def _dcp() -> MemoryStore:
    store = MemoryStore()
    save = Save(objects={"optim.param_groups.0.params": ["w"], "train.step": 2})
    save.cut("model.w", torch.arange(12.0).reshape(6, 2), 0, (0, 1))
    save.whole("optim.state.w.exp_avg", torch.ones(6, 2))
    write(store, "c", save)
    return store


def _megatron() -> MemoryStore:
    store = MemoryStore()
    write_checkpoint(store, "c", state(), buffers=True, common_file=False)
    return store


TORCH_FILE = _torch_file()
STORES: dict[str, tuple[MemoryStore, Callable[..., Checkpoint]]] = {
    "dcp": (_dcp(), dcp.read),
    "megatron": (_megatron(), megatron_core.read),
}

_EDITS = st.lists(
    st.tuples(
        st.sampled_from(("flip", "put", "cut", "insert", "copy", "swap")),
        st.integers(0, 1 << 30),
        st.integers(0, 255),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=6,
)


def _edited(data: bytes, edits: list[tuple[str, int, int, int]]) -> bytes:
    """Return ``data`` with bytes changed, cut out, doubled or exchanged."""
    made = bytearray(data)
    for kind, place, value, size in edits:
        at = place % (len(made) + 1)
        if kind == "flip" and at < len(made):
            made[at] ^= 1 << value % 8
        elif kind == "put" and at < len(made):
            made[at] = value
        elif kind == "cut":
            del made[at : at + size]
        elif kind == "insert":
            made[at:at] = bytes([value]) * size
        elif kind == "copy":
            made[at:at] = made[at : at + size]
        elif kind == "swap":
            low = value * 37 % (len(made) + 1)
            one, two = made[at : at + size], made[low : low + size]
            made[at : at + size], made[low : low + size] = two, one
    return bytes(made)


def _survives(read: Callable[[], Any]) -> bool:
    """Run ``read``; return whether it gave a value. Other errors than ours fail the test."""
    try:
        read()
    except UcpError:
        return False
    return True


def _read_file(data: bytes) -> Any:
    store = MemoryStore()
    store.write_atomic("d/a.pt", data, fsync=False)
    with reading_within(_MEMORY_BYTES):
        return as_json(read_torch_file(store, "d", "a.pt").tree, tensor=list, where="d/a.pt")


@given(_EDITS)
def test_damaged_torch_files_raise_our_errors(edits: list[tuple[str, int, int, int]]) -> None:
    """Every field of a zip is a number that somebody may have made up."""
    _survives(lambda: _read_file(_edited(TORCH_FILE, edits)))


@given(_EDITS)
def test_damaged_pickles_in_whole_torch_files_raise_our_errors(
    edits: list[tuple[str, int, int, int]],
) -> None:
    """With a checksum that fits, what is in the pickle reaches the machine."""
    import zipfile

    archive = zipfile.ZipFile(io.BytesIO(TORCH_FILE))
    inner = archive.read("archive/data.pkl")
    records = {"data/0": archive.read("archive/data/0")}
    _survives(lambda: _read_file(torch_zip(_edited(inner, edits), records)))


_OPCODES = (
    b"()]}l\x85\x86\x87td\x8f\x90\x91aesuN\x88\x89KMJ\x8a\x8bG.0122qhrj\x94c\x93R\x81\x92bQX\x8cC"
)
_WORDS = (
    b"cbuiltins\ngetattr\n",
    b"cbuiltins\neval\n",
    b"cposix\nsystem\n",
    b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy\ndtype\n",
    b"ccopyreg\n_reconstructor\n",
    b"ccopyreg\n__newobj__\n",
    b"c_codecs\nencode\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"cargparse\nNamespace\n",
    b"X\x02\x00\x00\x00f4",
    b"X\x06\x00\x00\x00latin1",
    b"C\x04abcd",
)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([bytes([code]) for code in _OPCODES]),
            st.sampled_from(_WORDS),
            st.binary(max_size=3),
        ),
        max_size=40,
    )
)
@example([b"cbuiltins\neval\n", b"X\x02\x00\x00\x00f4", b"\x85", b"R"])
def test_any_opcodes_raise_our_errors(parts: list[bytes]) -> None:
    """A machine of fifty opcodes has more states than anyone has thought of."""
    data = b"".join(parts) + b"."
    with reading_within(_MEMORY_BYTES):
        _survives(lambda: as_json(read_pickle(data, where="p"), tensor=list, where="p"))


_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.binary(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(_VALUES, st.sampled_from((2, 3, 4, 5)))
def test_plain_values_are_what_the_standard_library_reads(value: Any, protocol: int) -> None:
    """Safe and wrong would be no better than unsafe."""
    data = dumps(value, protocol)
    assert read_pickle(data, where="p") == pickle.loads(data)


@pytest.mark.parametrize("kind", STORES)
@given(st.data())
def test_damaged_metadata_raise_our_errors(kind: str, data: st.DataObject) -> None:
    """``.metadata`` is a pickle that torch loads with all trust, and no checksum guards it."""
    source, read = STORES[kind]
    store = MemoryStore()
    names = source.list("c")
    victim = data.draw(st.sampled_from((".metadata", ".metadata", *names)))
    for name in names:
        content = source.read(f"c/{name}")
        if name == victim:
            content = _edited(content, data.draw(_EDITS))
        store.write_atomic(f"c/{name}", content, fsync=False)
    _survives(lambda: read(store, "c"))


def test_the_files_are_read_where_nothing_is_damaged() -> None:
    """Else the tests above would prove nothing."""
    assert _survives(lambda: _read_file(TORCH_FILE))
    for store, read in STORES.values():
        assert _survives(lambda read=read, store=store: read(store, "c"))  # type: ignore[misc]
