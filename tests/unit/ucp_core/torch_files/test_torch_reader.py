"""Torch files are read by ranges, whatever torch puts into them; nothing in them runs."""

import argparse
import collections
import datetime as dt
import enum
import io
import pickle
import struct
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import hostile_pickles
from tests.support.counting_store import CountingStore
from ucp_core.errors import (
    CheckpointCorruptError,
    ChecksumMismatchError,
    ForeignClassError,
    MemoryBudgetError,
    UcpError,
)
from ucp_core.numerics import crc32
from ucp_core.torch_files import (
    Opaque,
    TensorRef,
    as_json,
    read_pickle,
    read_torch_file,
    read_torch_part,
    reading_within,
)
from ucp_core.torch_files.pickle_arrays import NumpyArray
from ucp_core.torch_files.pickle_classes import Global

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def _saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def _store(data: bytes) -> CountingStore:
    store = CountingStore()
    store.write_atomic("d/a.pt", data, fsync=False)
    return store


def _read(data: bytes) -> Any:
    return read_torch_file(_store(data), "d", "a.pt").tree


def _elements(data: bytes, ref: TensorRef) -> bytes:
    """Return the elements of a tensor in order, taken by its strides alone."""
    size = ref.num_bytes // max(1, ref.num_elements) if not ref.byte_strides else 0
    itemsize = {v: k.itemsize for k, v in DTYPES.items()}[ref.dtype]
    raw = data[ref.offset_bytes : ref.offset_bytes + ref.num_bytes]
    assert size in (0, itemsize)
    if 0 in ref.shape:
        return b""
    strides = [stride * itemsize for stride in ref.strides]
    return np.ndarray(ref.shape, f"V{itemsize}", raw, strides=strides).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_found_by_its_bytes(dtype: torch.dtype) -> None:
    """New dtypes are saved as untyped storages, which count bytes and not elements."""
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw & 1).bool() if dtype is torch.bool else raw.view(dtype)
    data = _saved({"a": tensor})
    ref = _read(data)["a"]
    assert (ref.dtype, ref.shape) == (DTYPES[dtype], tuple(tensor.shape))
    assert _elements(data, ref) == tensor.view(torch.uint8).numpy().tobytes()


def test_views_share_storages_and_keep_their_strides() -> None:
    """ZeRO's flat groups are saved as many views of one storage; a copy for each would lie."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tree = {
        "base": base,
        "transposed": base.t(),
        "column": base[:, 2],
        "corner": base[1:3, 2:5],
        "steps": base[::2, ::3],
        "expanded": base[:1].expand(4, 6),
        "scalar": base[3, 5],
        "empty": base[4:],
        "parameter": torch.nn.Parameter(base),
    }
    data = _saved(tree)
    found = _read(data)
    for name, tensor in tree.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert _elements(data, found[name]) == tensor.detach().contiguous().numpy().tobytes(), name
    assert {ref.extent for ref in found.values()} == {found["base"].extent}
    assert found["base"].byte_strides is None
    assert found["transposed"].byte_strides == (4, 24)
    assert found["column"].byte_strides == (24,)
    assert found["empty"].num_bytes == 0


def test_extents_are_the_storages_with_torchs_own_checksums() -> None:
    """They are all that proves the bytes of a foreign file; a wrong range proves nothing."""
    tree = {"a": torch.arange(5.0), "b": [torch.ones(3, dtype=torch.int8)], "c": torch.empty(0)}
    data = _saved(tree)
    file = read_torch_file(_store(data), "d", "a.pt")
    assert len(file.extents) == 2
    for extent in file.extents:
        stop = extent.offset_bytes + extent.num_bytes
        assert crc32(data[extent.offset_bytes : stop]) == extent.crc32
    assert file.tree["a"].extent in file.extents


def test_a_file_without_checksums_has_no_extents() -> None:
    """torch can leave them out, and writes zeros; a zero must not be taken for a checksum."""
    torch.serialization.set_crc32_options(False)
    try:
        data = _saved({"a": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    file = read_torch_file(_store(data), "d", "a.pt")
    assert file.extents == ()
    assert file.tree["a"].extent is None
    assert _elements(data, file.tree["a"]) == torch.ones(3).numpy().tobytes()


def test_two_reads_suffice_for_thousands_of_tensors() -> None:
    """On an object store each read is a request; headers one by one would take minutes."""
    tree = {f"layers.{i}.weight": torch.full((40, 20), float(i)) for i in range(3000)}
    data = _saved(tree)
    store = _store(data)
    reads: list[int] = []
    plain_read = store.read_range

    def counted(path: str, offset_bytes: int, size_bytes: int) -> bytes:
        reads.append(size_bytes)
        return plain_read(path, offset_bytes, size_bytes)

    store.read_range = counted  # type: ignore[method-assign]
    found = read_torch_file(store, "d", "a.pt").tree
    assert len(reads) <= 3
    assert sum(reads) < len(data) // 10
    assert (
        _elements(data, found["layers.2999.weight"]) == tree["layers.2999.weight"].numpy().tobytes()
    )


@pytest.mark.parametrize("alignment", [1, 4, 4096])
def test_any_alignment_of_records_is_read(alignment: int) -> None:
    """Where data begin follows from torch's padding rule only where the default was used."""
    from torch.utils import serialization as options

    old = options.config.save.storage_alignment
    options.config.save.storage_alignment = alignment
    try:
        data = _saved({"a": torch.arange(100.0), "b": torch.arange(7)})
    finally:
        options.config.save.storage_alignment = old
    found = _read(data)
    assert _elements(data, found["a"]) == torch.arange(100.0).numpy().tobytes()
    assert _elements(data, found["b"]) == torch.arange(7).numpy().tobytes()


def test_a_file_inside_a_larger_one_has_absolute_offsets() -> None:
    """torch DCP packs many of them into one file, at any offset."""
    inner = _saved({"a": torch.arange(9.0)})
    data = b"x" * 1003 + inner + b"y" * 77

    def read(start: int, length: int) -> bytes:
        return inner[start : start + length]

    found = read_torch_part(read, len(inner), "a.pt", where="a.pt (a)", offset_bytes=1003)
    assert _elements(data, found.tree["a"]) == torch.arange(9.0).numpy().tobytes()


def test_zip64_fields_are_read() -> None:
    """Files beyond 4 GiB have their sizes elsewhere, and no test can write one."""
    data = bytearray(_saved({"a": torch.arange(9.0)}))
    end = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, length, start, _ = struct.unpack_from("<IHHHHIIH", data, end)
    head = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, start)
    locator = struct.pack("<IIQI", 0x07064B50, 0, start + length, 1)
    tail = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    big = bytes(data[: start + length]) + head + locator + tail
    assert _elements(big, _read(big)["a"]) == torch.arange(9.0).numpy().tobytes()


class Colour(enum.Enum):
    """A class that only this test has."""

    RED = 1


def test_plain_values_come_as_themselves() -> None:
    """Client states hold anything; a value that is silently another one is the worst."""
    tree = {
        "ints": [0, -1, 255, 256, 65536, -(2**31), 2**31, 2**70, -(2**70)],
        "floats": (0.5, float("inf"), -0.0),
        "texts": ["", "a", "ä" * 300, "x" * 70000],
        "bytes": [b"", b"ab\xff", b"z" * 300],
        "others": [None, True, False, 1 + 2j],
        "sets": [{1, 2}, frozenset({"a"})],
        "ordered": collections.OrderedDict([("a", 1)]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "tallied": collections.defaultdict(int, {"a": 1}),
        "named": collections.defaultdict(str, {"a": "b"}),
        "counted": collections.Counter("aab"),
        "queue": collections.deque([1, 2]),
        "size": torch.Size([2, 3]),
        "keys": {1: "a", (2, "b"): "c", None: "d", False: "e", b"x": "f"},
        "same": [1],
    }
    tree["again"] = tree["same"]
    for protocol in (2, 4, 5):
        found = _read(_saved(tree, pickle_protocol=protocol))
        assert found["again"] is found["same"]
        assert found.pop("queue") == [1, 2]
        assert found == {key: value for key, value in tree.items() if key != "queue"}


def test_numpy_values_are_read_and_keep_their_identity() -> None:
    """The state of numpy's generator is an array in a tuple; scalars are steps and losses."""
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    tree: dict[str, Any] = {
        "state": np.random.RandomState(1).get_state(),
        "array": array,
        "again": array,
        "fortran": np.asfortranarray(array),
        "big": array.astype(">i4"),
        "half": np.array([[0.1], [np.inf]], np.float16),
        "complex": np.array([1 - 2j, 3], np.complex64),
        "cube": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        "none": np.zeros((2, 0, 3), bool),
        "scalar": np.float32(1.5),
        "int": np.int64(3),
        "flag": np.True_,
    }
    for protocol in (2, 5):
        found = _read(_saved(tree, pickle_protocol=protocol))
        assert found["state"][1].tolist() == tree["state"][1].tolist()
        for name, value in tree.items():
            if isinstance(value, np.ndarray):
                assert found[name].tolist() == value.tolist(), name
        assert found["again"] is found["array"]
        assert (found["scalar"], found["int"], found["flag"]) == (1.5, 3, True)


def test_known_foreign_objects_are_only_described() -> None:
    """Megatron keeps its arguments as a namespace, DeepSpeed its scaler as an object."""
    arguments = argparse.Namespace(lr=0.1, names=["a"], dtype=torch.bfloat16)
    found = _read(_saved({"args": arguments, "delta": dt.timedelta(seconds=2)}))
    assert type(found["args"]) is Opaque
    assert found["args"].name == "argparse.Namespace"
    assert found["args"].state["lr"] == 0.1
    assert type(found["args"].state["dtype"]) is Global
    assert found["args"].state["dtype"].name == "torch.bfloat16"
    assert as_json(found["args"], where="a")["state"]["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize(
    "value",
    [np.random.default_rng(0), Fraction(1, 3), range(3), slice(1, 2), ...],
    ids=lambda value: type(value).__name__,
)
def test_harmless_values_of_a_program_do_not_make_a_checkpoint_unreadable(value: Any) -> None:
    """A client state has what the program put there: data cursors, generators, ratios."""
    found = _read(_saved({"mine": value}))["mine"]
    assert isinstance(found, Opaque | Global)
    assert isinstance(as_json(found, where="mine"), dict | str)


def test_an_unknown_class_is_named_with_its_file_and_can_be_allowed() -> None:
    """Guessing at a class means running its code; leaving it out silently loses state."""
    tree = {"colour": Colour.RED}
    name = f"{Colour.__module__}.Colour"
    with pytest.raises(ForeignClassError, match=r"d/a\.pt.*Colour") as caught:
        _read(_saved(tree))
    assert caught.value.facts["name"] == name
    data = pickle.dumps(tree, protocol=2)
    found = read_pickle(data, where="p", allow=frozenset({name}))["colour"]
    assert (found.name, found.args) == (name, (1,))
    made = read_pickle(data, where="p", allow={name: lambda value: value + 41})
    assert made["colour"] == 42


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("qint8", lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        ("sparse", lambda: torch.eye(3).to_sparse()),
        ("meta", lambda: torch.empty(3, device="meta")),
        ("complex128", lambda: torch.ones(2, dtype=torch.complex128)),
        ("conjugated", lambda: torch.ones(2, dtype=torch.complex64).conj()),
    ],
)
def test_tensors_without_a_dense_form_are_refused_by_name(name: str, make: Any) -> None:
    """They have several parts or none; the bytes of one part are not the tensor."""
    with pytest.raises(ForeignClassError, match=name):
        _read(_saved({"a": make()}))


def test_older_and_other_formats_are_told_apart() -> None:
    """The remedies differ: load and save again, or look for the right file."""
    cases = {
        "before 1.6": _saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
        "truncated": _saved({"a": torch.ones(2000)})[:900],
        "not a file": b"hello",
        "zip file with 0": hostile_pickles.torch_zip(b"N.").replace(b"data.pkl", b"data.pkx"),
        "TorchScript": hostile_pickles.torch_zip(b"N.", {"constants.pkl": b"N."}),
        "big-endian": hostile_pickles.torch_zip(b"N.", {"byteorder": b"big"}),
    }
    for message, data in cases.items():
        with pytest.raises(CheckpointCorruptError, match=rf"d/a\.pt.*{message}"):
            _read(data)
    with pytest.raises(CheckpointCorruptError, match=r"d/a\.pt"):
        _read(b"")


def test_a_compressed_record_is_refused() -> None:
    """Its bytes are not the tensor's; torch never compresses."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"N" * 100 + b".")
    with pytest.raises(CheckpointCorruptError, match="compressed"):
        _read(out.getvalue())


def test_a_damaged_pickle_is_noticed_by_its_checksum() -> None:
    """torch.load does not look at it, and reads other shapes or values."""
    data = bytearray(_saved({"a": 1, "b": torch.ones(2)}))
    at = data.index(b"FloatStorage")
    data[at] ^= 1
    with pytest.raises(ChecksumMismatchError, match=r"d/a\.pt.*data\.pkl"):
        _read(bytes(data))


def test_every_truncation_is_an_error_that_names_the_file() -> None:
    """A copy that was cut short is the commonest damage of all."""
    data = _saved({"a": torch.arange(50.0), "b": {"c": [1, "x"]}})
    for size in range(0, len(data), 7):
        with pytest.raises(UcpError, match=r"d/a\.pt"):
            _read(data[:size])


def test_a_view_beyond_its_storage_is_refused() -> None:
    """Its bytes would be those of the next record."""
    data = _saved({"a": torch.arange(4, dtype=torch.int8)[:3]})
    inner = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    assert inner.count(b"K\x03\x85") == 1
    forged = hostile_pickles.torch_zip(
        inner.replace(b"K\x03\x85", b"K\x05\x85"), {"data/0": b"abcd"}
    )
    with pytest.raises(CheckpointCorruptError, match="ends at byte 5 of storage 0"):
        _read(forged)


@pytest.mark.parametrize("protocol", [2, 4])
def test_no_payload_runs_wherever_it_lies(tmp_path: Path, protocol: int) -> None:
    """A checkpoint from the internet is a program for every trusting unpickler."""
    marker = tmp_path / "executed"
    count = 0
    for payload in hostile_pickles.payloads(marker).values():
        for value in hostile_pickles.positions(payload).values():
            pickled = pickle.dumps(value, protocol)
            for data in (pickled, pickled.replace(b"cbuiltins\n", b"c__builtin__\n")):
                with pytest.raises(UcpError):
                    read_pickle(data, where="p")
                with pytest.raises(UcpError):
                    _read(hostile_pickles.torch_zip(data))
                count += 1
    for name, data in hostile_pickles.direct(marker).items():
        with pytest.raises(UcpError):
            raise AssertionError((name, read_pickle(data, where="p")))
    assert count == 80
    assert not marker.exists()


def test_the_payloads_do_run_where_they_are_trusted(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(hostile_pickles.payloads(marker)["eval"]))
    assert marker.exists()
    marker.unlink()
    pickle.loads(hostile_pickles.direct(marker)["newobj"].replace(b"\x81.", b"R."))
    assert marker.exists()


def test_what_is_read_in_one_go_is_the_same_opcode_by_opcode() -> None:
    """Sequences that make objects and shapes are taken whole, and each part can be named later."""
    text = struct.Struct("<B").pack
    size = b"\x8c" + text(5) + b"torch" + b"\x8c" + text(4) + b"Size" + b"\x93\x94"
    info = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n\x94"
    # A list: the shape, its parts by their numbers, the object, its dict.
    begin = b"\x80\x04]\x94(" + size + b"0h\x01"
    parts = (b"K\x03K\x04\x86", b"\x94\x85\x94R\x94h\x02h\x03h\x04", info + b")")
    end = b"\x81\x94}\x94(\x8c\x01aK\x07ubh\x06h\x07e."
    nothing = b"N0"

    trees = [
        read_pickle(begin + between.join(parts) + between + end, where="p")
        for between in (b"", nothing)
    ]

    for shape, pair, arguments, again, made, same, state in trees:
        assert shape == pair == (3, 4)
        assert arguments == (pair,)
        assert arguments[0] is pair
        assert again is shape
        assert same is made
        assert made.state is state
        assert state == {"a": 7}


@pytest.mark.parametrize("name", hostile_pickles.bombs())
@pytest.mark.timeout(120)
def test_no_pickle_takes_more_than_it_is_worth(name: str) -> None:
    """A few bytes can ask for terabytes, or for a hash that takes until the sun is cold."""
    with pytest.raises(CheckpointCorruptError, match="somewhere"):
        _kept(hostile_pickles.bombs()[name])


@pytest.mark.parametrize("name", hostile_pickles.harmless())
def test_memory_that_is_only_announced_is_not_taken(name: str) -> None:
    """The standard library allocates 32 GiB for the first of them."""
    assert read_pickle(hostile_pickles.harmless()[name], where="p") is None


def _kept(data: bytes) -> Any:
    """Return a value as a reader would keep it: what is nested beyond reason is refused there."""
    value = read_pickle(data, where="somewhere")
    try:
        return as_json(value, where="somewhere")
    except ForeignClassError as error:
        raise CheckpointCorruptError(f"somewhere: {error}") from error


def test_shared_values_cannot_blow_up_json() -> None:
    """Sixty doublings are 120 bytes of pickle and an exabyte of JSON."""
    value = read_pickle(b"]" + b"2\x86" * 60 + b".", where="p")

    with reading_within(4 << 20), pytest.raises(MemoryBudgetError, match="p: mine"):
        as_json(value, where="p: mine")


@pytest.mark.parametrize(
    "value",
    ["x" * (1 << 20), {"x" * (1 << 20): 1}, b"x" * (1 << 20), "\0" * (1 << 18), 10**4298],
    ids=["text", "key", "bytes", "escaped", "integer"],
)
def test_what_repeats_cannot_blow_up_json(value: Any) -> None:
    """A pickle has it once, and JSON each time: 20,000 times a megabyte is 20 GB."""
    with reading_within(512 << 20):
        assert as_json([value] * 10, where="p")
        with pytest.raises(MemoryBudgetError, match=r"p: with this.*512.0 MiB.*--memory"):
            as_json([value] * 30_000, where="p")


def test_all_values_of_a_checkpoint_share_one_budget() -> None:
    """Each of a thousand keys can stay below any bound of its own."""
    with reading_within(64 << 20):
        for number in range(15):
            as_json("x" * (1 << 20), where=f"p: key {number}")
        with pytest.raises(MemoryBudgetError, match="p: key 15"):
            as_json("x" * (1 << 20), where="p: key 15")


def test_what_a_reader_notes_of_each_value_is_paid_for() -> None:
    """A million keys of a client state are a million notes, whatever they hold."""
    with reading_within(1 << 20):
        for _ in range(1000):
            as_json(None, where="p: key")
        with pytest.raises(MemoryBudgetError, match="p: key"):
            as_json([None] * 2000, where="p: key")


def test_an_integer_that_python_cannot_print_is_no_small_value() -> None:
    """JSON would have it in decimal digits, of which Python prints 4,300."""
    assert as_json(10**4298, where="p") == 10**4298
    with pytest.raises(ForeignClassError, match=r"an integer of \d+ bits"):
        as_json(10**4500, where="p")


def test_an_array_of_no_elements_cannot_blow_up_json() -> None:
    """Its lists would be a billion, though it has no byte."""
    array = NumpyArray((1 << 30, 0), b"", "f4", "<", is_fortran=False)

    with pytest.raises(MemoryBudgetError):
        as_json([array, 1], where="p")
