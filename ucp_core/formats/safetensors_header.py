"""Reads and writes the header of a safetensors file; it never trusts the input.

The layout is from https://github.com/huggingface/safetensors: 8 bytes of length, a JSON object that
names dtype, shape and ``data_offsets`` of every tensor, then the data without gaps.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

from ucp_core.formats.refusals import corrupt
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.storage import Store

_LENGTH_BYTES = 8
#: Most headers fit into this first request.
_FIRST_BYTES = 64 << 10
#: The limit of the reference implementation, which keeps a header within memory.
HEADER_BYTES_MAX = 100_000_000
#: torch and numpy stop at 64.
_NDIM_MAX = 64
#: SPEC.md, section 2: integers are below it.
_INTEGER_MAX = 1 << 60


class TensorRange(NamedTuple):
    """A tensor of the file; offsets count from the first byte of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start_byte: int
    stop_byte: int


class Header(NamedTuple):
    """A parsed header: the tensors in the order of their bytes, and the metadata."""

    tensors: tuple[TensorRange, ...]
    metadata: Mapping[str, str]


def read_header(
    store: Store, path: str, file_bytes: int, offset_bytes: int = 0
) -> tuple[Header, int]:
    """Return the header that begins at a byte of a file, and the byte where its data begin."""
    size = file_bytes - offset_bytes
    text = store.read_range(path, offset_bytes, max(0, min(size, _FIRST_BYTES)))
    if len(text) < _LENGTH_BYTES:
        _refuse(path, None, f"has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(text[:_LENGTH_BYTES], "little")
    stop = _LENGTH_BYTES + length
    if length > HEADER_BYTES_MAX:
        _refuse(path, None, f"says its header has {length} bytes, {HEADER_BYTES_MAX} are allowed")
    if stop > size:
        _refuse(path, None, f"says its header has {length} bytes, but the file has only {size}")
    if len(text) < stop:
        text += store.read_range(path, offset_bytes + len(text), stop - len(text))
    return parse_header(text[_LENGTH_BYTES:stop], size - stop, path), offset_bytes + stop


def parse_header(text: bytes, data_bytes: int, where: str) -> Header:
    """Return the header after checks: tensors fill the file without overlap or gap."""
    document = _document(text, where)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(where, None, "has a __metadata__ that is not an object of strings")
    tensors = [_tensor(name, value, data_bytes, where) for name, value in document.items()]
    tensors.sort(key=lambda t: (t.start_byte, t.stop_byte))
    stop_byte = 0
    previous = ""
    for tensor in tensors:
        if tensor.start_byte < stop_byte:
            _refuse(where, tensor.name, f"overlaps tensor {previous!r}")
        if tensor.start_byte > stop_byte:
            _refuse(where, tensor.name, f"follows a gap of {tensor.start_byte - stop_byte} bytes")
        stop_byte, previous = tensor.stop_byte, tensor.name
    if stop_byte != data_bytes:
        _refuse(where, None, f"has {data_bytes} bytes of data, but its tensors have {stop_byte}")
    return Header(tuple(tensors), metadata)


def _document(text: bytes, where: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(where, None, "is not a safetensors file: its header is not a JSON object")
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse(where, None, f"has a header that is not JSON: {error}")
    assert isinstance(document, dict), "JSON that begins with a brace is an object"
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            # The parser would drop one of the two.
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _tensor(name: str, value: Any, data_bytes: int, where: str) -> TensorRange:
    try:
        name.encode()
    except UnicodeEncodeError:
        _refuse(where, repr(name), "has a name that is not text")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(where, name, "is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse(where, name, f"has dtype {dtype!r}; the known ones are {', '.join(DTYPE_BYTES)}")
    if not _is_counts(shape) or len(shape) > _NDIM_MAX:
        _refuse(where, name, f"has shape {_short(shape)}, not a list of sizes")
    if not _is_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - a start and a stop
        _refuse(where, name, f"has data_offsets {_short(offsets)}, not a start and a stop")
    start_byte, stop_byte = offsets
    if not start_byte <= stop_byte <= data_bytes:
        _refuse(
            where,
            name,
            f"has data_offsets [{start_byte}, {stop_byte}], but the file has {data_bytes} bytes "
            "of data; is it cut short?",
        )
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if stop_byte - start_byte != expected:
        _refuse(
            where,
            name,
            f"has {stop_byte - start_byte} bytes, {dtype}{_short(shape)} needs {_short(expected)}",
        )
    return TensorRange(name, dtype, tuple(shape), start_byte, stop_byte)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _INTEGER_MAX for n in value)


def _short(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # more digits than Python prints
        return "(a gigantic number)"
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 - a line of a terminal


def _refuse(where: str, name: str | None, what: str) -> NoReturn:
    if name is None:
        raise corrupt(where, f"it {what}")
    raise corrupt(where, f"tensor {name!r} {what}")


def print_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length and the JSON that begin a file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_bytes = 0
    for name, dtype, shape in tensors:
        stop_byte = offset_bytes + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset_bytes, stop_byte],
        }
        offset_bytes = stop_byte
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
