"""Checks that float32 masters belong to a parameter, because they round to its weights.

It reads a few elements at either end of each piece of the parameter.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator
from math import copysign, inf
from typing import NamedTuple

from ucp_core.formats.shared.values import whole_tensor
from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, TensorEntry, TensorKey
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

#: Elements to compare at either end; parameters that agree in these count as equal.
_SAMPLE = 64
_HALVES = ("F16", "BF16")


class Param(NamedTuple):
    """One rank's part of a parameter: fragments, one after the other along dim 0."""

    key: str
    dtype: str
    fragments: tuple[Fragment, ...]
    is_replica: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements that the rank holds."""
        return sum(box.num_elements for box in self.boxes)

    @property
    def boxes(self) -> list[Box]:
        """Return the boxes of the fragments in the model's tensor."""
        return [fragment.box for fragment in self.fragments]

    @property
    def num_experts(self) -> int:
        """Return how many experts it holds; above 1 only if they are one parameter."""
        return max(box.shape[-3] if len(box.start) > 2 else 1 for box in self.boxes)  # noqa: PLR2004


class Buffer:
    """A flat tensor of one slot of many parameters."""

    def __init__(self, store: Store, directory: str, entry: TensorEntry) -> None:
        self._store = store
        self._directory = directory
        self.dtype = entry.dtype
        (self.num_elements,) = entry.shape
        self.fragments = entry.fragments
        self._starts = [fragment.box.start[0] for fragment in entry.fragments]

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, str, int]]:
        """Yield the parts of ``[start, stop)``: bounds, file, and byte of the first element."""
        index = max(0, bisect_right(self._starts, start) - 1)
        for fragment in self.fragments[index:]:
            first = fragment.box.start[0]
            low, high = max(start, first), min(stop, fragment.box.stop[0])
            if first >= stop:
                break
            if low < high:
                at = fragment.offset_bytes + (low - first) * DTYPE_BYTES[self.dtype]
                yield low, high, fragment.file, at

    def holds(self, start: int, param: Param) -> bool:
        """Return whether the masters from element ``start`` on round to a parameter's weights."""
        if start + param.num_elements > self.num_elements:
            return False
        for fragment in param.fragments:
            count = fragment.box.num_elements
            sample = min(_SAMPLE, count)
            for skip in {0, count - sample}:
                if not self._agrees(start + skip, param.dtype, fragment, skip, sample):
                    return False
            start += count
        return True

    def _agrees(self, low: int, dtype: str, weights: Fragment, first: int, count: int) -> bool:
        """Return whether masters from ``low`` on round to ``count`` weights from ``first`` on."""
        size, itemsize = DTYPE_BYTES[self.dtype], DTYPE_BYTES[dtype]
        masters = b"".join(
            self._read(file, at, (end - begin) * size)
            for begin, end, file, at in self.cut(low, low + count)
        )
        begin = weights.offset_bytes + first * itemsize
        return len(masters) == count * size and rounded(masters, self.dtype, dtype) == self._read(
            weights.file, begin, count * itemsize
        )

    def _read(self, file: str, offset_bytes: int, num_bytes: int) -> bytes:
        return self._store.read_range(join(self._directory, file), offset_bytes, num_bytes)


def is_master_of(
    store: Store, directory: str, masters: TensorRef, start: int, weight: TensorRef
) -> bool:
    """Return whether the flat masters from element ``start`` on round to ``weight``."""
    if masters.dtype != weight.dtype and (masters.dtype != "F32" or weight.dtype not in _HALVES):
        return False
    if weight.byte_strides is not None or masters.byte_strides is not None:
        return False
    key = TensorKey("", "weight")
    flat = whole_tensor(key, masters, (masters.num_elements,))
    whole = whole_tensor(key, weight)
    return Buffer(store, directory, flat).holds(start, Param("", weight.dtype, whole.fragments))


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
