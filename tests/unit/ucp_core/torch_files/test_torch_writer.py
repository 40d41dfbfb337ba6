"""Torch files written without torch: torch itself has to read them."""

import io
import zipfile
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ucp_core.errors import UcpError
from ucp_core.storage import MemoryStore
from ucp_core.torch_files import (
    Instance,
    Named,
    Size,
    TensorData,
    torch_file_chunks,
    write_torch_file,
)
from ucp_core.torch_files.zip_writer import ZipStream

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def written(tree: Any, *, allow: frozenset[str] = frozenset()) -> bytes:
    return b"".join(bytes(chunk) for chunk in torch_file_chunks(tree, allow=allow))


def loaded(data: bytes, *, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(data), weights_only=weights_only)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    """Newer dtypes are stored in another form, and empty records have no descriptor."""
    tensor = torch.randint(0, 2, shape).to(DTYPES[dtype])
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    read = loaded(written({"t": TensorData.of_bytes(dtype, shape, data)}))["t"]

    assert (read.dtype, read.shape, read.is_contiguous()) == (DTYPES[dtype], shape, True)
    assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == data


def test_plain_values_come_back_as_they_were() -> None:
    """Every kind of value has an opcode of its own, and integers have two."""
    tree: dict[Any, Any] = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**200],
        "floats": [0.1, -0.0, float("inf")],
        "texts": ["", "\u00fc\u4e00\n'", "x" * 300],
        "bytes": bytes(range(256)),
        "tuple": (1, (), ("a",)),
        "empty": {},
        7: OrderedDict([("b", 1), ("a", 2)]),
        "size": Size((2, 3)),
    }

    read = loaded(written(tree))

    assert read == tree | {"size": torch.Size((2, 3))}
    assert type(read[7]) is OrderedDict
    assert type(read["size"]) is torch.Size


def test_torch_maps_the_file_without_reading_it(tmp_path: Path) -> None:
    """Mapping needs storages that begin at aligned addresses; torch does not check that."""
    values = torch.arange(1000, dtype=torch.float64)
    data = values.numpy().tobytes()
    tree = [TensorData.of_bytes("U8", (1,), b"x"), TensorData.of_bytes("F64", (1000,), data)]
    path = tmp_path / "x.pt"
    path.write_bytes(written(tree))

    read = torch.load(path, mmap=True)

    assert torch.equal(read[1], values)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read)


def test_tied_tensors_stay_tied() -> None:
    """Two equal copies would train apart."""
    tensor = TensorData.of_bytes("F32", (2,), bytes(8))

    read = loaded(written({"wte": tensor, "head": tensor}))

    assert read["wte"].data_ptr() == read["head"].data_ptr()


def test_foreign_objects_are_made_by_their_own_class() -> None:
    """An enum is made by a call, an object with attributes is not."""
    tree = {
        "called": Instance("fractions.Fraction", ("3/4",)),
        "built": Instance("types.SimpleNamespace", (), {"scale": 2.0}),
        "named": Named("torch.float16"),
    }
    allow = frozenset({"fractions.Fraction", "types.SimpleNamespace", "torch.float16"})

    read = loaded(written(tree, allow=allow), weights_only=False)

    assert read == {
        "called": Fraction(3, 4),
        "built": SimpleNamespace(scale=2.0),
        "named": torch.float16,
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Instance("os.system", ("true",)), "is a os.system"),
        (Named("builtins.eval"), "is a builtins.eval"),
        (Counter(), "is a collections.Counter"),
        (object(), "is a builtins.object"),
        (1 << 5000, "integer of 626 bytes"),
    ],
    ids=["a function", "a named function", "a Counter", "an object", "a large integer"],
)
def test_a_value_that_cannot_be_written_is_named_and_nothing_is_written(
    value: Any, problem: str
) -> None:
    """A file that names any class runs it where it is read."""
    store = MemoryStore()

    with pytest.raises(UcpError, match=problem) as caught:
        write_torch_file(store, "x.pt", {"a": [1, value]}, fsync=False)

    assert "a[1]" in str(caught.value)
    assert store.list("") == ()


def test_deep_nesting_is_an_error_of_ours() -> None:
    """The pickler follows the tree by recursion."""
    tree: Any = []
    for _ in range(100_000):
        tree = [tree]

    with pytest.raises(UcpError, match="nested too deeply"):
        torch_file_chunks(tree)


def test_the_checksums_in_the_file_are_real() -> None:
    """torch neither needs nor verifies them, so a wrong one would go unnoticed until needed."""
    data = bytearray(written({"t": TensorData.of_bytes("F32", (64,), bytes(range(256)))}))
    whole = zipfile.ZipFile(io.BytesIO(data)).testzip()
    data[data.index(bytes(range(256))) + 7] ^= 1

    assert whole is None
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_a_tensor_above_4_gib_is_read(tmp_path: Path) -> None:
    """Sizes and offsets leave 32 bits, in three places each."""
    chunk = bytes(1 << 20)
    large = TensorData("U8", (4097 << 20,), lambda: (chunk for _ in range(4097)))
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        for part in torch_file_chunks([large, TensorData.of_bytes("I8", (2,), b"ab")]):
            if part is chunk:
                file.seek(len(chunk), io.SEEK_CUR)  # a hole: nothing reaches the disk
            else:
                file.write(part)

    read = torch.load(path, mmap=True)

    assert read[0].shape == (4097 << 20,)
    assert read[1].tolist() == [97, 98]
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == 4097 << 20


def test_more_records_than_16_bits_count() -> None:
    """A model with many small tensors has more."""
    stream = ZipStream("a")
    parts = [bytes(p) for n in range(66_000) for p in stream.record(str(n), 1, (b"x",))]
    parts += stream.end()

    with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as archive:
        assert len(archive.infolist()) == 66_000
        assert archive.read("a/65999") == b"x"
