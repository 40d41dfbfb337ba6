"""Elements of every floating dtype as float64 and back, for means.

Every element is exact in float64; the way back rounds once, to nearest, ties to even. A mean
never exceeds its largest term, so nothing overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucp_core.errors import CheckpointCorruptError
from ucp_core.numerics.casts import cast
from ucp_core.numerics.dtypes import FLOATS


class _Small(NamedTuple):
    """A format of one byte.

    Attributes:
        significant_bits: Of a normal number, with the hidden bit.
        exponent_min: The smallest number is 2 to this power.
        num_finite: Number of positive codes that are finite, in order; then come infinity or NaN.
    """

    significant_bits: int
    exponent_min: int
    num_finite: int


_FP8 = {"F8_E4M3": _Small(4, -9, 0x7F), "F8_E5M2": _Small(3, -16, 0x7C)}


def decode(dtype: str, data: memoryview) -> NDArray[np.float64]:
    """Return the elements of ``data`` of dtype ``dtype``; a complex number is two elements.

    Raises:
        CheckpointCorruptError: The dtype is not a floating one.
    """
    if dtype in FLOATS:
        return np.frombuffer(cast(data, dtype, "F64"), np.float64)
    if dtype == "C64":
        return decode("F32", data)
    if dtype in _FP8:
        values: NDArray[np.float64] = _fp8_values(dtype)[np.frombuffer(data, np.uint8)]
        return values
    raise CheckpointCorruptError(
        f"{dtype} has no mean: only floating dtypes can be averaged", dtype=dtype
    )


def encode(dtype: str, values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the bytes of ``values`` as elements of ``dtype``, rounded once."""
    if dtype in FLOATS:
        return np.frombuffer(cast(values.data.cast("B"), "F64", dtype), np.uint8)
    if dtype == "C64":
        return encode("F32", values)
    small = _FP8[dtype]
    _, exponents = np.frexp(values)
    units = np.ldexp(1.0, np.maximum(exponents - small.significant_bits, small.exponent_min))
    with np.errstate(invalid="ignore"):
        # Dividing by a power of two is exact, so ``rint`` is the only rounding.
        rounded = np.abs(np.where(np.isfinite(values), np.rint(values / units) * units, values))
    # Infinity follows the last finite number.
    codes = np.searchsorted(_fp8_values(dtype)[: small.num_finite], rounded).astype(np.uint8)
    codes[np.isnan(values)] = 0x7F
    codes[np.signbit(values)] |= 0x80
    return codes


def _fp8_values(dtype: str) -> NDArray[np.float64]:
    """Return the value of each of the 256 codes."""
    small = _FP8[dtype]
    codes = np.arange(128)
    mantissa_bits = small.significant_bits - 1
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
    half = np.ldexp((mantissa + hidden).astype(np.float64), np.maximum(exponent, 1) - 1)
    half *= 2.0**small.exponent_min
    half[small.num_finite :] = np.nan
    if dtype == "F8_E5M2":
        half[small.num_finite] = np.inf
    return np.concatenate([half, -half])
