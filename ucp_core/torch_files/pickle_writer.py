"""The pickle stream of a torch file, for a tree of plain values and tensors.

It is written opcode by opcode (protocol 2, which torch itself uses), so neither torch nor the
classes need to be importable: a class is only named.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, packed_strides
from ucp_core.storage import Buffer
from ucp_core.torch_files.pickle_tensors import DTYPE_NAMES, STORAGES, TORCH_DTYPES

#: Dtypes with a storage class of their own; torch writes the others as untyped storages.
_STORAGES = {
    TORCH_DTYPES[dtype]: f"torch.{name}Storage"
    for name, dtype in STORAGES.items()
    if TORCH_DTYPES[dtype] is not None
}
_UNTYPED = {dtype: name for dtype, name in DTYPE_NAMES.items() if dtype not in _STORAGES}
_INT32_MAX = 2**31
_INT_BYTES_MAX = 255


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A tensor to write. The same object twice in a tree is one storage, like tied weights."""

    dtype: str  #: By safetensors' names.
    shape: tuple[int, ...]  #: Its shape; it is written C-contiguous.
    #: Returns its bytes in order, from the start at every call.
    chunks: Callable[[], Iterable[Buffer]]

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the size of the data."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @classmethod
    def of_bytes(cls, dtype: str, shape: tuple[int, ...], data: Buffer) -> TensorData:
        """Return a small tensor with the given bytes."""
        return cls(dtype, shape, lambda: (data,))


class Instance(NamedTuple):
    """An object of a foreign class, which is named and never imported."""

    name: str  #: ``module.Class``.
    #: Arguments of the call that makes it (``state`` is None), or of its ``__new__``.
    args: tuple[Any, ...] = ()
    #: Its attributes, or the argument of its ``__setstate__``; None if the call makes it whole,
    #: as for an enum.
    state: dict[str, Any] | tuple[Any, ...] | None = None


class Named(NamedTuple):
    """A class, function or dtype that is only referred to, such as ``torch.float16``."""

    name: str


class Size(NamedTuple):
    """A ``torch.Size``."""

    shape: tuple[int, ...]


def pickle_tree(tree: Any, *, allow: frozenset[str]) -> tuple[bytes, list[TensorData]]:
    """Return the pickle of ``tree`` and its storages, in the order of their keys 0, 1, ..."""
    stream = _PickleStream(allow)
    try:
        stream.value(tree, "")
    except RecursionError as error:
        raise UcpError("a value is nested too deeply to be written to a torch file") from error
    return b"\x80\x02" + b"".join(stream.parts) + b".", stream.storages


class _PickleStream:
    def __init__(self, allow: frozenset[str]) -> None:
        self.parts: list[bytes] = []
        self.storages: list[TensorData] = []
        self._allow = allow
        self._memo: dict[str, int] = {}
        self._storage_keys: dict[int, int] = {}

    def value(self, value: Any, where: str) -> None:
        """Add one value; ``where`` is its place in the tree, for errors."""
        writer = _WRITERS.get(type(value))
        if writer is None:
            raise UcpError(
                f"{where or 'the tree'} is a {type(value).__module__}.{type(value).__qualname__}, "
                "which cannot be written to a torch file: give plain values and tensors",
                where=where,
            )
        writer(self, value, where)

    def name(self, name: str, where: str) -> None:
        """Refer to ``module.attribute``; the second time by the memo."""
        known = self._memo.get(name)
        if known is not None:
            self.parts.append(b"j" + struct.pack("<I", known))
            return
        module, _, attribute = name.rpartition(".")
        if not module or "\n" in name or name not in self._allow:
            raise UcpError(
                f"{where} is a {name}, which is none of the classes that may be written",
                where=where,
                name=name,
            )
        self._memo[name] = len(self._memo)
        self.parts.append(f"c{module}\n{attribute}\n".encode())
        self.parts.append(b"r" + struct.pack("<I", self._memo[name]))

    def write_int(self, value: int, where: str) -> None:
        if -_INT32_MAX <= value < _INT32_MAX:
            self.parts.append(b"J" + struct.pack("<i", value))
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > _INT_BYTES_MAX:
            raise UcpError(f"{where} is an integer of {len(data)} bytes", where=where)
        self.parts.append(b"\x8a" + struct.pack("<B", len(data)) + data)

    def write_str(self, value: str, _: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.parts.append(b"X" + struct.pack("<I", len(data)) + data)

    def write_bytes(self, value: bytes, where: str) -> None:
        # Protocol 2 has no bytes; this is how Python itself writes them there.
        self.name("_codecs.encode", where)
        self.value((value.decode("latin1"), "latin1"), where)
        self.parts.append(b"R")

    def write_tuple(self, value: tuple[Any, ...], where: str) -> None:
        self.parts.append(b"(")
        for index, item in enumerate(value):
            self.value(item, f"{where}[{index}]")
        self.parts.append(b"t")

    def write_list(self, value: list[Any], where: str) -> None:
        self.parts.append(b"](")
        for index, item in enumerate(value):
            self.value(item, f"{where}[{index}]")
        self.parts.append(b"e")

    def write_ordered(self, value: OrderedDict[Any, Any], where: str) -> None:
        self.name("collections.OrderedDict", where)
        self.parts.append(b")R")
        self._items(value, where)

    def write_dict(self, value: dict[Any, Any], where: str) -> None:
        self.parts.append(b"}")
        self._items(value, where)

    def _items(self, value: dict[Any, Any], where: str) -> None:
        self.parts.append(b"(")
        for key, item in value.items():
            self.value(key, where)
            self.value(item, f"{where}.{key}" if where else f"{key}")
        self.parts.append(b"u")

    def write_size(self, value: Size, where: str) -> None:
        self.name("torch.Size", where)
        self.value((tuple(value.shape),), where)
        self.parts.append(b"R")

    def write_instance(self, value: Instance, where: str) -> None:
        self.name(value.name, where)
        self.value(tuple(value.args), where)
        if value.state is None:
            self.parts.append(b"R")
            return
        self.parts.append(b"\x81")
        state = value.state
        self.value(state if isinstance(state, tuple) else dict(state), where)
        self.parts.append(b"b")

    def write_tensor(self, value: TensorData, where: str) -> None:
        known = self._storage_keys.get(id(value))
        if known is None:
            known = self._storage_keys[id(value)] = len(self.storages)
            self.storages.append(value)
        untyped = _UNTYPED.get(value.dtype)
        storage = "torch.storage.UntypedStorage" if untyped else _STORAGES[value.dtype]
        extent = value.num_bytes if untyped else value.num_elements
        self.name(f"torch._utils._rebuild_tensor_v{3 if untyped else 2}", where)
        self.parts.append(b"((")
        self.write_str("storage", where)
        self.name(storage, where)
        self.write_str(str(known), where)
        self.write_str("cpu", where)
        self.write_int(extent, where)
        self.parts.append(b"tQ")
        self.write_int(0, where)
        self.write_tuple(tuple(value.shape), where)
        # torch computes strides as if empty dims had extent 1.
        self.write_tuple(packed_strides([max(n, 1) for n in value.shape], 1), where)
        self.value(False, where)
        self.write_ordered(OrderedDict(), where)
        if untyped:
            self.name(f"torch.{untyped}", where)
        self.parts.append(b"tR")


#: Every class that tensors and containers need; callers add their own.
CORE_NAMES = frozenset(
    {
        "_codecs.encode",
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.storage.UntypedStorage",
        *_STORAGES.values(),
        *(f"torch.{name}" for name in _UNTYPED.values()),
    }
)

_WRITERS: dict[type, Callable[[_PickleStream, Any, str], None]] = {
    type(None): lambda stream, _, __: stream.parts.append(b"N"),
    bool: lambda stream, value, _: stream.parts.append(b"\x88" if value else b"\x89"),
    int: _PickleStream.write_int,
    float: lambda stream, value, _: stream.parts.append(b"G" + struct.pack(">d", value)),
    str: _PickleStream.write_str,
    bytes: _PickleStream.write_bytes,
    tuple: _PickleStream.write_tuple,
    list: _PickleStream.write_list,
    dict: _PickleStream.write_dict,
    OrderedDict: _PickleStream.write_ordered,
    Size: _PickleStream.write_size,
    Named: lambda stream, value, where: stream.name(value.name, where),
    Instance: _PickleStream.write_instance,
    TensorData: _PickleStream.write_tensor,
}
