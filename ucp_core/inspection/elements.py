"""Compare the elements of two boxes: how many differ, by how much, and which is the first.

Elements are equal if their bits are: NaN equals itself, and -0.0 differs from 0.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ucp_core.geometry import DTYPE_BYTES
from ucp_core.numerics import FLOATS, cast, decode, numpy_dtype

#: Elements to compare at a time; bounds the memory.
_CHUNK_ELEMENTS = 1 << 17
_EIGHT = 8


class Tolerance(NamedTuple):
    """Numbers ``a`` and ``b`` differ only if ``|a - b| > absolute + relative * |b|``."""

    absolute: float = 0.0
    relative: float = 0.0


class Difference(NamedTuple):
    """How two boxes or tensors differ."""

    num_different: int
    num_nan: int  #: How many of these are NaN on either side.
    max_abs: float | None  #: Largest difference of the others; None if there are none.
    #: Largest distance of two floats, counted in representable numbers; None for other dtypes.
    max_ulp: int | None
    first: int  #: Flat position of the first element that differs.
    values: tuple[Any, Any]  #: That element on both sides.

    def joined(self, other: Difference) -> Difference:
        """Return both as one; ``other`` comes later and counts from the same origin."""
        return Difference(
            self.num_different + other.num_different,
            self.num_nan + other.num_nan,
            _larger(self.max_abs, other.max_abs),
            _larger(self.max_ulp, other.max_ulp),
            self.first,
            self.values,
        )


def _larger(one: Any, two: Any) -> Any:
    return two if one is None or (two is not None and two > one) else one


def common_dtype(one: str, two: str) -> str | None:
    """Return the dtype to cast both to for a comparison, or None if there is none.

    It is the coarser dtype, because one side has already lost what that dtype cannot hold. For F16
    and BF16 it is F32.
    """
    if one == two:
        return one
    if one not in FLOATS or two not in FLOATS:
        return None
    if {one, two} == {"F16", "BF16"}:
        return "F32"
    return min(one, two, key=lambda dtype: DTYPE_BYTES[dtype])


def compare(
    one: memoryview, two: memoryview, dtypes: tuple[str, str], tolerance: Tolerance
) -> Difference | None:
    """Return how two boxes of the same shape differ, or None if they do not.

    Args:
        dtypes: If they differ, both are cast to ``common_dtype``.
        tolerance: Differences to ignore.
    """
    if dtypes[0] == dtypes[1] and _equal(one, two):
        return None
    dtype = common_dtype(*dtypes)
    assert dtype is not None, f"{dtypes} cannot be compared"
    steps = [_CHUNK_ELEMENTS * DTYPE_BYTES[name] for name in dtypes]
    found: Difference | None = None
    for number in range(-(-len(one) // steps[0])):
        chunks = [
            data[number * step : (number + 1) * step]
            for data, step in zip((one, two), steps, strict=True)
        ]
        if dtypes[0] != dtypes[1]:
            chunks = [cast(data, d, dtype) for data, d in zip(chunks, dtypes, strict=True)]
        part = _compare(chunks[0], chunks[1], dtype, tolerance)
        if part is not None:
            part = part._replace(first=part.first + number * _CHUNK_ELEMENTS)
            found = part if found is None else found.joined(part)
    return found


def _equal(one: memoryview, two: memoryview) -> bool:
    cut = len(one) // _EIGHT * _EIGHT
    a, b = (np.frombuffer(data[:cut], np.uint64) for data in (one, two))
    return np.array_equal(a, b) and one[cut:] == two[cut:]


def _compare(
    one: memoryview, two: memoryview, dtype: str, tolerance: Tolerance
) -> Difference | None:
    unsigned = np.dtype(f"<u{DTYPE_BYTES[dtype]}")
    a, b = np.frombuffer(one, unsigned), np.frombuffer(two, unsigned)
    places = np.flatnonzero(a != b)
    if len(places) == 0:
        return None
    a, b = a[places], b[places]
    x, y = _values(a, dtype), _values(b, dtype)
    if x is None or y is None:
        first = int(places[0])
        return Difference(len(places), 0, None, None, first, (int(a[0]), int(b[0])))
    gap = _gap(x, y)
    if any(tolerance):
        kept = _counts(x, y, gap, tolerance)
        if not kept.any():
            return None
        places = places[kept]
        a, b, x, y, gap = (array[kept] for array in (a, b, x, y, gap))
    numbers = ~(np.isnan(x) | np.isnan(y))
    max_ulp = None
    if dtype in FLOATS and numbers.any():
        max_ulp = int(_ulps(a[numbers], b[numbers]).max())
    return Difference(
        len(a),
        len(a) - int(numbers.sum()),
        float(gap[numbers].max()) if numbers.any() else None,
        max_ulp,
        int(places[0]),
        (x[0].item(), y[0].item()),
    )


def _values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any] | None:
    """Return the elements as numbers, or None for a dtype known only by its bits."""
    if dtype == "C64":
        return bits.view("<c8")
    if dtype[0] in "BF" and dtype != "BOOL":
        if dtype == "F8_E8M0":
            return None
        return decode(dtype, memoryview(bits.view(np.uint8).data))
    known = numpy_dtype(dtype)
    return None if known is None else bits.view(known)


def _gap(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.dtype == np.bool_:
        return np.ones(len(x), np.uint8)
    if x.dtype.kind in "iu":
        # The distance of two signed numbers fits into an unsigned one of the same size.
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        low, high = np.minimum(x, y).view(unsigned), np.maximum(x, y).view(unsigned)
        distance: npt.NDArray[Any] = high - low
        return distance
    with np.errstate(invalid="ignore", over="ignore"):
        gap: npt.NDArray[Any] = np.abs(x - y)
    return gap


def _counts(
    x: npt.NDArray[Any], y: npt.NDArray[Any], gap: npt.NDArray[Any], tolerance: Tolerance
) -> npt.NDArray[np.bool_]:
    """Return which differences exceed the tolerance; NaN and NaN are equal."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(y) if y.dtype.kind == "c" else np.abs(y.astype(np.float64))
        distance = gap.astype(np.float64)
        # A tolerance relative to infinity would allow everything.
        beyond = ~(distance <= tolerance.absolute + tolerance.relative * size) | np.isinf(distance)
    both_nan: npt.NDArray[np.bool_] = np.isnan(x) & np.isnan(y)
    counts: npt.NDArray[np.bool_] = beyond & ~both_nan
    return counts


def _ulps(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return how many representable numbers lie between two floats."""
    x, y = _ordered(a), _ordered(b)
    steps: npt.NDArray[Any] = np.maximum(x, y) - np.minimum(x, y)
    return steps


def _ordered(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Map floats to unsigned numbers of the same order; both zeros become one."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    ordered: npt.NDArray[Any] = np.where(bits & sign, sign - (bits ^ sign), bits + sign)
    return ordered
