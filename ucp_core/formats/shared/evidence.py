"""Checks that a float32 master belongs to a parameter, because it rounds to the parameter's weight.

It reads a few elements of both.
"""

from __future__ import annotations

import struct
from math import copysign, inf

from ucp_core.geometry import DTYPE_BYTES
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

#: Elements to compare at either end; parameters that agree in these count as equal.
_SAMPLE = 32
_HALVES = ("F16", "BF16")


def is_master_of(
    store: Store, directory: str, masters: TensorRef, start: int, weight: TensorRef
) -> bool:
    """Return whether the flat masters from element ``start`` on round to ``weight``."""
    count = weight.num_elements
    if start + count > masters.num_elements:
        return False
    if masters.dtype != weight.dtype and (masters.dtype != "F32" or weight.dtype not in _HALVES):
        return False
    if weight.byte_strides is not None or masters.byte_strides is not None:
        return False
    size = min(count, _SAMPLE)
    for first in {0, count - size}:
        found = _read(store, directory, masters, start + first, size)
        expected = _read(store, directory, weight, first, size)
        if rounded(found, masters.dtype, weight.dtype) != expected:
            return False
    return True


def _read(store: Store, directory: str, ref: TensorRef, first: int, count: int) -> bytes:
    itemsize = DTYPE_BYTES[ref.dtype]
    offset = ref.offset_bytes + first * itemsize
    return store.read_range(join(directory, ref.file), offset, count * itemsize)


def rounded(data: bytes, source: str, target: str) -> bytes:
    """Return a few floats in another dtype, rounded to the nearest as torch does."""
    if source == target:
        return data
    if source != "F32" or target not in _HALVES:
        from ucp_core.numerics import cast

        return bytes(cast(memoryview(data), source, target))
    # These are the usual dtypes; importing numpy would take 0.1 s.
    count = len(data) // DTYPE_BYTES[source]
    if target == "F16":
        return b"".join(map(_half, struct.unpack(f"<{count}f", data)))
    return struct.pack(f"<{count}H", *map(_bf16, struct.unpack(f"<{count}I", data)))


def _half(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        # A master above the range of float16 becomes infinite, as in torch.
        return struct.pack("<e", copysign(inf, value))


def _bf16(bits: int) -> int:
    upper = bits >> 16
    if bits & 0x7FFFFFFF > 0x7F800000:  # noqa: PLR2004 - not a number, which stays one
        return upper | 0x40
    # Add half of the last place, less one if that place is even: ties round to even.
    return (bits + 0x7FFF + (upper & 1)) >> 16
