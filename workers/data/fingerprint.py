"""Fingerprints of samples: a few microseconds each, whatever their size.

They distinguish samples of a dataset, but do not detect every change: they cover only three pieces
of a large array or a long text. ``content_of`` covers a few whole samples.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Bytes of each of three pieces: first, middle and last.
_PIECE_BYTES: Final = 128
#: Number of items at either end of a list that are included, and the depth.
_ITEMS_MAX, _DEPTH_MAX = 8, 4
#: NumPy's counterparts of torch's own types.
_OF_TORCH_ONLY: Final = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_PLAIN: Final = (bool, int, float, complex, type(None))
#: These are tuples, because a union would be made in each call.
_TEXT, _LISTS = (str, bytes), (list, tuple)
#: Number of tensors of a sample whose numbers are compared.
_FLOATS_MAX: Final = 4
#: Different kinds of machines round differently. Norms and projections of different samples differ
#: by more.
_TOLERANCE: Final = 1e-3

#: A CRC-32 of all values without fractions, then a projection and the norm of each tensor with
#: fractions.
Content: TypeAlias = Sequence[float]


def fingerprint(value: Any, before: int = 0, depth: int = 0) -> int:
    """Return a CRC-32 over the content of a sample, the same in every process.

    A sample holds tensors, arrays, numbers, text, lists, mappings, or objects with attributes.
    ``before`` is the CRC-32 to continue. ``depth`` is that of ``value`` in the sample; deep values
    are left out.
    """
    if isinstance(value, Tensor):
        return _of_tensor(value, before)
    if isinstance(value, np.ndarray):
        return _of_array(value, before)
    if isinstance(value, _PLAIN):
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, _TEXT):
        ends = value[:_PIECE_BYTES], value[-_PIECE_BYTES:]
        return zlib.crc32(repr((len(value), *ends)).encode(), before)
    before = zlib.crc32(type(value).__name__.encode(), before)
    if depth == _DEPTH_MAX:
        return before
    if isinstance(value, _LISTS):
        before = zlib.crc32(str(len(value)).encode(), before)
        items = [*value[:_ITEMS_MAX], *value[max(_ITEMS_MAX, len(value) - _ITEMS_MAX) :]]
        if items and isinstance(items[0], _PLAIN):
            # This is the usual case, token ids: take the numbers of a list at once.
            return zlib.crc32(repr(items).encode(), before)
    elif isinstance(value, Mapping):
        items = [part for pair in value.items() for part in pair]
    else:
        items = [part for pair in getattr(value, "__dict__", {}).items() for part in pair]
    for item in items:
        before = fingerprint(item, before, depth + 1)
    return before


def _of_tensor(tensor: Tensor, before: int) -> int:
    try:
        # Most values need no check first.
        array = tensor.numpy()
    except (TypeError, RuntimeError):
        return _of_unusual_tensor(tensor, before)
    return _of_array(array, before)


def _of_unusual_tensor(tensor: Tensor, before: int) -> int:
    if (bits := _OF_TORCH_ONLY.get(tensor.dtype)) is not None:
        tensor = tensor.view(bits)
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        # Reading its content would wait for the device.
        return zlib.crc32(f"{tensor.dtype}{tensor.shape}".encode(), before)
    return _of_array(tensor.numpy(force=True), before)


def _of_array(array: NDArray[Any], before: int) -> int:
    if array.dtype.hasobject:
        return fingerprint(array.flat[:_ITEMS_MAX].tolist(), before, _DEPTH_MAX - 1)
    before = zlib.crc32(f"{array.dtype.num}{array.shape}".encode(), before)
    size, each = array.size, _PIECE_BYTES // array.itemsize or 1
    if size <= 3 * each:
        return zlib.crc32(array.tobytes(), before)
    # ``flat`` takes any strides, but half a microsecond longer.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for begin in (0, (size - each) // 2, size - each):
        before = zlib.crc32(flat[begin : begin + each].tobytes(), before)
    return before


def content_of(value: Any) -> Content:
    """Return an identity of the whole sample, the same on any machine except for rounding.

    It waits for the device if the sample has tensors there.
    """
    floats: list[NDArray[np.float64]] = []
    found = [float(_exactly(value, 0, 0, floats))]
    for array in floats[:_FLOATS_MAX]:
        norm = float(np.linalg.norm(array))
        # Signs by a hash of the place (Knuth's multiplier).
        places = np.arange(array.size, dtype=np.uint64) * np.uint64(2654435761)
        signs = 1.0 - 2.0 * ((places >> np.uint64(16)) & np.uint64(1)).astype(np.float64)
        found += [float(signs @ array) / norm if norm else 0.0, norm]
    return found + [0.0] * (1 + 2 * _FLOATS_MAX - len(found))


def are_alike(one: Content, other: Content) -> bool:
    """Return whether two samples are the same."""
    near = np.isclose(one[1:], other[1:], rtol=_TOLERANCE, atol=_TOLERANCE)
    return one[0] == other[0] and bool(near.all())


def _exactly(value: Any, before: int, depth: int, floats: list[NDArray[np.float64]]) -> int:
    """Return a CRC-32 over ``value`` without its fractions, which are added to ``floats``."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return fingerprint(value, before)
        value = (value.detach().double() if value.is_floating_point() else value).numpy(force=True)
    elif hasattr(value, "__array__") or _is_of_numbers(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        before = zlib.crc32(repr(value.shape).encode(), before)
        if value.dtype.kind != "f":
            return zlib.crc32(np.ascontiguousarray(value).tobytes(), before)
        floats.append(np.nan_to_num(value.reshape(-1).astype(np.float64)))
        return before
    if isinstance(value, str):
        # A path may begin differently on each node.
        return zlib.crc32(value.rpartition("/")[2].encode(errors="replace"), before)
    if isinstance(value, bytes):
        return zlib.crc32(value, before)
    if depth == _DEPTH_MAX or not isinstance(value, (*_LISTS, Mapping)):
        return zlib.crc32(type(value).__name__.encode(), before)
    items = value.values() if isinstance(value, Mapping) else value
    for item in items:
        before = _exactly(item, before, depth + 1, floats)
    return before


def _is_of_numbers(value: Any) -> bool:
    """Return whether a value is a number, or a list of numbers."""
    every = value if isinstance(value, _LISTS) and value else [value]
    return all(isinstance(one, bool | int | float) for one in every)
