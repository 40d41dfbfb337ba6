"""Keys of torch DCP mean what the other keys say they mean; alike items are not mixed up."""

import io
import struct
from collections.abc import Callable

import pytest
import torch

from tests.support.dcp_files import Save, write
from tests.support.foreign_reading import loaded, same_bits
from ucp_core.errors import UcpError
from ucp_core.formats.dcp import reader as dcp
from ucp_core.formats.dcp.key_names import classify
from ucp_core.storage import MemoryStore
from ucp_core.torch_files import TensorFiles

_STATISTICS = [("statistics", "mean"), ("statistics", "deviation")]


def test_slots_of_several_parts_end_where_the_parameters_name_ends() -> None:
    """Shampoo keeps factors in lists; cut at the last dot they belong to no parameter."""
    shapes = {
        "model.layers.0.w": (2, 2),
        "optim.state.layers.0.w.factors.0": (2, 2),
        "optim.state.layers.0.w.exp_avg": (2, 2),
        "optim.state.unknown.w.exp_avg": (2, 2),
    }
    names = classify(shapes, ["optim.param_groups.layers.0.w.lr"], {})
    assert names.weights == {"model.layers.0.w": "layers.0.w"}
    assert names.states == {
        "optim.state.layers.0.w.factors.0": ("layers.0.w", "factors.0"),
        "optim.state.layers.0.w.exp_avg": ("layers.0.w", "exp_avg"),
        "optim.state.unknown.w.exp_avg": ("unknown.w", "exp_avg"),
    }
    assert names.groups == {
        "optim.param_groups.layers.0.w.lr": ("optim", "layers.0.w", "lr"),
    }


def test_a_second_copy_of_the_weights_is_not_the_model() -> None:
    """Averages of weights have the same names under another prefix."""
    shapes = {
        "ema.w": (2,),
        "model.w": (2,),
        "optim.state.w.exp_avg": (2,),
    }
    names = classify(shapes, [], {})
    assert names.weights == {"model.w": "w"}
    assert names.others == ["ema.w"]


def test_two_models_in_one_are_the_model() -> None:
    """Its optimizer has no usual form; the larger one alone would lose its place."""
    parts = [("model", "maker", "w"), ("model", "judge", "w"), ("model", "judge", "b")]
    paths = {".".join(path): path for path in parts}

    names = classify(dict.fromkeys(paths, (2,)), [], paths)

    assert names.weights == {f"model.{name}": name for name in ("maker.w", "judge.w", "judge.b")}
    assert names.others == []


def test_without_an_optimizer_the_model_is_where_it_usually_is() -> None:
    """Statistics of it can be more tensors than it has; their names are not the model's."""
    paths = {f"{top}.{name}": (top, name) for top, name in [("model", "w"), *_STATISTICS]}

    names = classify(dict.fromkeys(paths, (2,)), [], paths)

    assert names.weights == {"model.w": "w"}
    assert names.others == [f"{top}.{name}" for top, name in _STATISTICS]


@pytest.mark.parametrize("checksums", [True, False])
def test_items_of_one_size_are_told_apart_by_their_pickles(*, checksums: bool) -> None:
    """Equal items are parsed once; shapes and dtypes of the same size are not equal."""
    store = MemoryStore()
    save = Save()
    tensors = {
        "a": torch.arange(12.0).reshape(2, 6),
        "b": torch.arange(12.0).reshape(6, 2),
        "c": torch.arange(12, dtype=torch.int32).reshape(2, 6),
        "d": torch.arange(12.0).reshape(2, 6) + 1,
        "e": torch.arange(12.0).reshape(6, 2).t(),
    }
    for key, tensor in tensors.items():
        save.whole(key, tensor)
    torch.serialization.set_crc32_options(checksums)
    try:
        write(store, "c", save)
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = dcp.read(store, "c")
    for key, tensor in tensors.items():
        assert same_bits(loaded(checkpoint, key), tensor), key


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, length: data[start : start + length]


def test_a_damaged_directory_is_not_taken_for_a_known_one() -> None:
    """The shortcut for alike files must see every byte that it does not parse."""
    out = io.BytesIO()
    torch.save(torch.arange(12.0), out)
    data = out.getvalue()
    files = TensorFiles()
    first = files.read(_reader(data), len(data), "f", where="w", offset_bytes=0)
    other = bytearray(data)
    at = other.index(b"archive/data/0", other.index(b"PK\x01\x02")) - 46
    (header,) = struct.unpack_from("<I", other, at + 42)
    struct.pack_into("<I", other, at + 42, header + 64)
    with pytest.raises(UcpError, match="w"):
        files.read(_reader(bytes(other)), len(other), "f", where="w", offset_bytes=0)
    changed = bytearray(data)
    changed[first.offset_bytes] ^= 1
    struct.pack_into("<I", changed, at + 16, 7)
    again = files.read(_reader(bytes(changed)), len(changed), "g", where="w", offset_bytes=100)
    assert (again.file, again.offset_bytes) == ("g", first.offset_bytes + 100)
    assert again.extent is not None
    assert again.extent.crc32 == 7
