"""Where the tensors of a torch file are: stand-ins for torch's rebuild functions. Pure."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn

from ucp_core.errors import CheckpointCorruptError, ForeignClassError
from ucp_core.geometry import DTYPE_BYTES, Extent, is_packed

_NDIM_MAX = 64
_INT_MAX = 1 << 60
_SEQUENCES = (tuple, list)
#: Layers and ranks repeat, so there are few different shapes.
_is_packed = lru_cache(maxsize=64)(is_packed)

#: safetensors' name of each torch dtype; None if it has none.
TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex128": None,
    "complex32": None,
    "float8_e4m3fnuz": None,
    "float8_e5m2fnuz": None,
    "float4_e2m1fn_x2": None,
    "qint8": None,
    "quint8": None,
    "qint32": None,
    "quint4x2": None,
    "quint2x4": None,
}
#: torch's name of each of safetensors' dtypes.
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if dtype is not None}
#: torch's dtype by the beginning of the name of its storage class.
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}


class TensorRef(NamedTuple):
    """A tensor in a torch file."""

    dtype: str  #: safetensors' name.
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: Strides, in elements, along each dim.
    file: str  #: The name given to ``read_torch_file``.
    offset_bytes: int  #: Position of the first element in the file.
    extent: Extent | None  #: Its whole storage with the crc32; None if torch wrote no checksum.

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes from the first element to the end of the last one."""
        return _span(self.shape, self.strides) * DTYPE_BYTES[self.dtype]

    @property
    def byte_strides(self) -> tuple[int, ...] | None:
        """Return the strides in bytes, or None if the elements are C-contiguous."""
        if 0 in self.shape or _is_packed(self.shape, self.strides, 1):
            return None
        return tuple(stride * DTYPE_BYTES[self.dtype] for stride in self.strides)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: a record of the file."""

    where: str  #: Path of the file, for messages.
    key: str  #: Its name in the pickle.
    file: str  #: The file name that its tensors get.
    offset_bytes: int  #: Position in the file.
    num_bytes: int  #: Its size.
    crc32: int | None  #: torch's checksum; None if torch wrote none.
    dtype: str | None  #: torch's name; None for an untyped storage.

    @property
    def extent(self) -> Extent | None:
        """Return its range with its checksum."""
        if self.crc32 is None:
            return None
        return Extent(self.offset_bytes, self.num_bytes, self.crc32)


@lru_cache(maxsize=64)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to the end of the last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def extents_of(value: Any) -> tuple[int, ...]:
    """Return a shape, offsets or strides as a tuple, after checks."""
    if type(value) not in _SEQUENCES or len(value) > _NDIM_MAX:
        msg = "a shape or strides are not a short tuple"
        raise TypeError(msg)
    for extent in value:
        if type(extent) is not int or not 0 <= extent < _INT_MAX:
            msg = "a shape or strides are not sizes"
            raise ValueError(msg)
    return tuple(value)


def rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    """Stand for ``torch._utils._rebuild_tensor`` and ``_rebuild_tensor_v2``.

    ``rest``: requires_grad, hooks, and the flags of a view.
    """
    return _tensor(storage, None, offset, shape, strides, rest[2:3])


def rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    *rest: Any,
) -> TensorRef:
    """Stand for ``torch._utils._rebuild_tensor_v3``: the storage is untyped."""
    name = getattr(dtype, "name", "")
    return _tensor(storage, name.removeprefix("torch."), offset, shape, strides, rest[:1])


def _tensor(
    storage: Any,
    dtype: str | None,
    offset: Any,
    shape: Any,
    strides: Any,
    views: tuple[Any, ...],
) -> TensorRef:
    if type(storage) is not StorageRef:
        msg = "a tensor has no storage"
        raise TypeError(msg)
    if views and views[0]:
        raise ForeignClassError(
            f"{storage.where}: a conjugated or negated view cannot be read: save it resolved",
            path=storage.where,
        )
    name = known_dtype(dtype or storage.dtype or "uint8", storage.where)
    extents, steps = extents_of(shape), extents_of(strides)
    if type(offset) is not int or not 0 <= offset < _INT_MAX or len(extents) != len(steps):
        msg = "a tensor's offset or strides do not fit its shape"
        raise ValueError(msg)
    itemsize = DTYPE_BYTES[name]
    stop = (offset + _span(extents, steps)) * itemsize
    if stop > storage.num_bytes and 0 not in extents:
        raise CheckpointCorruptError(
            f"{storage.where}: a tensor of shape {list(extents)} ends at byte {stop} of storage "
            f"{storage.key}, which has {storage.num_bytes}: the file is damaged",
            path=storage.where,
        )
    start = storage.offset_bytes + min(offset * itemsize, storage.num_bytes)
    return TensorRef(name, extents, steps, storage.file, start, storage.extent)


def known_dtype(name: str, where: str) -> str:
    """Return safetensors' name of a torch dtype; raise ``ForeignClassError`` if it has none."""
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise ForeignClassError(
            f"{where}: a tensor of dtype torch.{name} cannot be read: save it in another dtype",
            path=where,
            name=f"torch.{name}",
        )
    return found


def rebuild_parameter(data: Any, *_: Any) -> Any:
    """Stand for ``torch._utils._rebuild_parameter``: a parameter is its tensor here."""
    if type(data) is not TensorRef:
        msg = "a parameter is not a tensor"
        raise TypeError(msg)
    return data


def rebuild_from_type(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """Stand for ``torch._tensor._rebuild_from_type_v2``: the tensor without its attributes."""
    if type(args) is not tuple or function.make not in _REBUILD:
        msg = "a tensor is made by something that makes none"
        raise TypeError(msg)
    return rebuild_parameter(function.make(*args))


_REBUILD = (rebuild_tensor, rebuild_tensor_v3, rebuild_parameter)


class Storage:
    """Stands for a storage class: persistent ids name it, and calls of it are refused."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype

    def __call__(self, *args: Any) -> NoReturn:
        """Refuse."""
        msg = f"a storage is called with {len(args)} arguments"
        raise TypeError(msg)
