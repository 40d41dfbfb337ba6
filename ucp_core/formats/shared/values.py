"""Converts values of foreign pickles to JSON and back, and numbers to tensors.

A fragment must name bytes in a file. If a pickle holds a step count as a Python number, no file has
its bytes. So they are put into a file in memory, whose name begins with ``@``.
"""

import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from ucp_core.errors import CheckpointCorruptError, ForeignClassError
from ucp_core.formats.refusals import corrupt
from ucp_core.geometry import Box, Fragment, TensorEntry, TensorKey
from ucp_core.storage import Buffer, MemoryStore, Store, join
from ucp_core.torch_files import TensorData, TensorRef, as_json

#: The usual name of this file.
INLINE_NAME = "@inline"
#: Methods of a store that read one file.
_READS = frozenset(("read", "read_range", "read_ranges", "exists", "size"))


def overlay(store: Store, files: Mapping[str, bytes]) -> Store:
    """Return a store that reads ``files``, named ``@...``, from memory in any directory.

    ``store`` does everything else, including writes.
    """
    assert all(name.startswith("@") for name in files), sorted(files)
    return cast("Store", _Overlay(store, files))


class _Overlay:
    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        self._store = self.below = store
        self._files, self._names = MemoryStore(), frozenset(files)
        for name, data in files.items():
            self._files.write_atomic(name, data, fsync=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        own: Any = getattr(self._files, name, None)
        below = getattr(self._store, name)
        if name == "kept_open":
            own = nullcontext
        elif name not in _READS:
            return below

        def read(path: str, *arguments: Any) -> Any:
            file = path.rsplit("/", 1)[-1]
            return own(file, *arguments) if file in self._names else below(path, *arguments)

        return read


#: A random generator's state has 5 KiB.
SMALL_TENSOR_BYTES = 64 << 10

_FORMATS = {
    "F64": "d",
    "F32": "f",
    "F16": "e",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
    "BOOL": "?",
}
#: Dtypes whose values are Python numbers.
NUMBER_DTYPES = frozenset(_FORMATS)
#: Errors that Python raises if a structure is not the expected one.
_NONSENSE = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    re.error,
    struct.error,
)
#: The largest step count that is exact in float32.
_EXACT_MAX = 1 << 24
#: SPEC.md, section 2: integers are below it.
_INTEGER_MAX = 1 << 60


@contextmanager
def refusing_nonsense(where: str, framework: str) -> Iterator[None]:
    """Turn Python's errors about a foreign file's structure into one of ours.

    A pickle can have any structure. Checks at every level would make up most of a reader.
    """
    try:
        yield
    except _NONSENSE as error:
        raise corrupt(
            where, f"it is not as {framework} writes it: {type(error).__name__}: {error}"
        ) from error


def number_of(data: Buffer, dtype: str) -> float | int | bool:
    """Return the number in the bytes of a tensor; ``dtype`` is one of ``NUMBER_DTYPES``."""
    value: float | int | bool = struct.unpack(f"<{_FORMATS[dtype]}", data)[0]
    return value


def json_value(value: Any, store: Store, directory: str, where: str, *, exact: bool = False) -> Any:
    """Return ``value`` as JSON: tensors of one element as numbers, other small ones in base64.

    Args:
        where: The file in the directory and the key, for messages.
        exact: Mark all values that JSON lacks, so that ``restored`` converts them back.
    """

    def read(ref: TensorRef) -> bytes:
        return store.read_range(join(directory, ref.file), ref.offset_bytes, ref.num_bytes)

    def tensor(ref: TensorRef) -> Any:
        found = None
        if not ref.shape and ref.dtype in NUMBER_DTYPES:  # Python has no bfloat16
            found = number_of(read(ref), ref.dtype)
        if found is not None and not exact:
            return found
        if found is not None and abs(found) < float("inf"):
            return {"dtype": ref.dtype, "shape": [], "value": found}
        if ref.num_bytes > SMALL_TENSOR_BYTES:
            raise ForeignClassError(
                f"a tensor {ref.dtype}{list(ref.shape)} in {ref.file} is too large for a small "
                "value"
            )
        made: dict[str, Any] = {"dtype": ref.dtype, "shape": list(ref.shape)}
        if ref.byte_strides is not None:
            made["strides"] = list(ref.strides)
        return {**made, "base64": b64encode(read(ref)).decode()}

    return as_json(value, where=join(directory, where), tensor=tensor, exact=exact)


def whole_tensor(
    key: TensorKey, ref: TensorRef, shape: tuple[int, ...] | None = None
) -> TensorEntry:
    """Return the entry of a tensor that one file holds whole; ``shape`` reshapes a flat one."""
    shape = ref.shape if shape is None else shape
    fragment = Fragment(
        Box.full(shape),
        ref.file,
        ref.offset_bytes,
        ref.num_bytes,
        None,
        (),
        strides=ref.byte_strides,
    )
    fragments = () if 0 in shape else (fragment,)
    return TensorEntry(key=key, dtype=ref.dtype, shape=shape, fragments=fragments)


class Scalars:
    """Tensors of one element, whose bytes are in a torch file or in memory."""

    def __init__(self) -> None:
        self.entries: dict[TensorKey, TensorEntry] = {}
        self._data = bytearray()
        self._offsets: dict[bytes, int] = {}

    def add(self, key: TensorKey, value: TensorRef | float) -> None:
        """Add a number, or a tensor of one element, unless the key has one.

        Raise an error if no dtype can hold it.
        """
        if key in self.entries:
            return
        if isinstance(value, TensorRef):
            value = value._replace(shape=(), strides=())
        else:
            dtype, data = _packed(key, value)
            if data not in self._offsets:
                self._offsets[data] = len(self._data)
                self._data += data
            value = TensorRef(dtype, (), (), INLINE_NAME, self._offsets[data], None)
        self.entries[key] = whole_tensor(key, value)

    def overlay(self, store: Store) -> Store:
        """Return a store that also reads the values in memory."""
        return overlay(store, {INLINE_NAME: bytes(self._data)}) if self._data else store


def _packed(key: TensorKey, value: float) -> tuple[str, bytes]:
    """Return the dtype and bytes; a step is float32, as in torch's optimizers, if that is exact."""
    is_step = key.slot == "step"
    if isinstance(value, bool):
        return "BOOL", struct.pack("<?", value)
    if not abs(value) < _INTEGER_MAX and (is_step or isinstance(value, int)):
        raise CheckpointCorruptError(f"{key} is a number that no tensor can hold")
    if abs(value) <= _EXACT_MAX and (is_step or isinstance(value, int)):
        return "F32", struct.pack("<f", value)
    if isinstance(value, int):
        return "I64", struct.pack("<q", value)
    return "F64", struct.pack("<d", value)


def restored(value: Any) -> Any:
    """Return a value of ``extra`` as it was before ``json_value``, which must have been exact."""
    match value:
        case list():
            return [restored(item) for item in value]
        case {"dtype": str(dtype), "shape": list(shape), "base64": str(text), **rest} if not rest:
            return TensorData.of_bytes(dtype, tuple(shape), b64decode(text))
        case {"dtype": str(dtype), "shape": [], "value": number, **rest} if not rest:
            return TensorData.of_bytes(dtype, (), struct.pack(f"<{_FORMATS[dtype]}", number))
        case {"base64": str(text), **rest} if not rest:
            return b64decode(text)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(restored, items))
        case {"dict": list(pairs), **rest} if not rest:
            return {key: restored(item) for key, item in pairs}
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case dict():
            return {key: restored(item) for key, item in value.items()}
        case _:
            return value
