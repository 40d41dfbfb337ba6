"""Arrays of numpy in foreign pickles, read without numpy, whose import takes 0.1 s. Pure.

The states of random generators are such arrays; losses and steps are such scalars.
"""

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

#: Kinds and sizes of numpy in struct's terms; a complex number is two of them.
_CODES = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "f",
    "c16": "d",
}
_BYTE_ORDERS = {"<": "<", ">": ">", "=": "=", "|": "="}
_NDIM_MAX = 64


@dataclass(frozen=True, slots=True, eq=False)
class NumpyArray:
    """An array of numbers or booleans, as its pickle has it."""

    shape: tuple[int, ...]  #: The shape of the array; empty for a scalar.
    data: bytes | bytearray  #: Its elements, without gaps.
    dtype: str  #: numpy's name without the byte order, such as ``f4``.
    byte_order: str  #: ``<``, ``>``, or ``=`` or ``|`` for this machine's order.
    is_fortran: bool  #: Whether neighbours along the first dim are adjacent.

    def __post_init__(self) -> None:
        if self.dtype not in _CODES or self.byte_order not in _BYTE_ORDERS:
            msg = f"a numpy array of dtype {self.byte_order}{self.dtype}"
            raise TypeError(msg)
        if len(self.shape) > _NDIM_MAX or min(self.shape, default=0) < 0:
            msg = f"an array of shape {self.shape[:8]}"
            raise ValueError(msg)
        if self.num_elements * int(self.dtype[1:]) != len(self.data):
            msg = f"{len(self.data)} bytes for an array of shape {self.shape} of {self.dtype}"
            raise ValueError(msg)

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def tolist(self) -> Any:
        """Return its elements as nested lists, like numpy; a scalar as its number."""
        code = _CODES[self.dtype]
        count = len(self.data) // struct.calcsize(f"={code}")
        values: Any = struct.unpack(f"{_BYTE_ORDERS[self.byte_order]}{count}{code}", self.data)
        if self.dtype[0] == "c":
            values = [complex(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        steps = [1] * len(self.shape)
        step = 1
        for dim in range(len(steps)) if self.is_fortran else reversed(range(len(steps))):
            steps[dim] = step
            step *= self.shape[dim]

        def nested(start: int, dim: int) -> Any:
            if dim == len(steps):
                return values[start]
            return [nested(start + i * steps[dim], dim + 1) for i in range(self.shape[dim])]

        return nested(0, 0)
