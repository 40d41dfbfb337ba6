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
from torch import Tensor

__all__ = ["fingerprint"]

#: Bytes of each of three pieces: first, middle and last.
_PIECE_BYTES: Final = 256
#: Items of a list that are looked at, of either end, and how deep.
_ITEMS_MAX, _DEPTH_MAX = 8, 4
_PLAIN: Final = (bool, int, float, complex, type(None))


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
    if isinstance(value, str | bytes):
        ends = value[:_PIECE_BYTES], value[-_PIECE_BYTES:]
        return zlib.crc32(repr((len(value), *ends)).encode(), before)
    before = zlib.crc32(type(value).__name__.encode(), before)
    if depth == _DEPTH_MAX:
        return before
    if isinstance(value, list | tuple):
        before = zlib.crc32(str(len(value)).encode(), before)
        items = value if len(value) <= 2 * _ITEMS_MAX else [*value[:_ITEMS_MAX], *value[-_ITEMS_MAX:]]
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
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        # To look inside would wait for the device.
        return zlib.crc32(repr((tensor.dtype, tensor.shape)).encode(), before)
    if tensor.dtype in {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}:
        # NumPy has none of these.
        tensor = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8)
    return _of_array(tensor.numpy(force=True), before)


def _of_array(array: Any, before: int) -> int:
    before = zlib.crc32(repr((array.dtype.str, array.shape)).encode(), before)
    if array.dtype.hasobject:
        return fingerprint(array.flat[:_ITEMS_MAX].tolist(), before, _DEPTH_MAX - 1)
    each = max(1, _PIECE_BYTES // array.itemsize)
    if array.size <= 3 * each:
        return zlib.crc32(array.tobytes(), before)
    for first in (0, (array.size - each) // 2, array.size - each):
        before = zlib.crc32(array.flat[first : first + each].tobytes(), before)
    return before
