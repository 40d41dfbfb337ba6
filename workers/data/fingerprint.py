"""Fingerprints of samples: a few microseconds each, whatever their size.

They tell samples of a dataset apart, not every change to one: of a large array or a long text
they take three pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Bytes of each of three pieces: first, middle and last.
_PIECE_BYTES: Final = 128
#: Items of a list that are looked at, of either end, and how deep.
_ITEMS_MAX, _DEPTH_MAX = 8, 4
#: What NumPy has instead of torch's own types.
_OF_TORCH_ONLY: Final = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_PLAIN: Final = (bool, int, float, complex, type(None))
#: Not unions, which would be made each time.
_TEXT, _LISTS = (str, bytes), (list, tuple)


def fingerprint(value: Any, before: int = 0, depth: int = 0) -> int:
    """Return a CRC-32 over what a sample holds, the same in every process.

    Args:
        value: Tensors, arrays, numbers, text, lists, mappings, or objects with attributes.
        before: The fingerprint of what came before.
        depth: How deep in a sample ``value`` is.
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
            # Token ids, most often: the numbers of one list at once.
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
        # Most often there is nothing to ask first.
        array = tensor.numpy()
    except (TypeError, RuntimeError):
        return _of_unusual_tensor(tensor, before)
    return _of_array(array, before)


def _of_unusual_tensor(tensor: Tensor, before: int) -> int:
    if (bits := _OF_TORCH_ONLY.get(tensor.dtype)) is not None:
        tensor = tensor.view(bits)
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        # To look inside would wait for the device.
        return zlib.crc32(f"{tensor.dtype}{tensor.shape}".encode(), before)
    return _of_array(tensor.numpy(force=True), before)


def _of_array(array: NDArray[Any], before: int) -> int:
    if array.dtype.hasobject:
        return fingerprint(array.flat[:_ITEMS_MAX].tolist(), before, _DEPTH_MAX - 1)
    before = zlib.crc32(f"{array.dtype.num}{array.shape}".encode(), before)
    size, each = array.size, _PIECE_BYTES // array.itemsize or 1
    if size <= 3 * each:
        return zlib.crc32(array.tobytes(), before)
    # ``flat`` takes any strides, and half a microsecond more.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    for begin in (0, (size - each) // 2, size - each):
        before = zlib.crc32(flat[begin : begin + each].tobytes(), before)
    return before
