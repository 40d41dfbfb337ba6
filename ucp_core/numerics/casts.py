"""Casts between float dtypes, bfloat16 and float8 included: one rounding, ties to even.

As in IEEE 754, NaN stays NaN, infinities and zeros keep their sign, and too large values become
infinite. ml_dtypes would round float64 twice on the way to bfloat16 and float8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucp_core.errors import CheckpointCorruptError
from ucp_core.numerics.dtypes import FLOATS

_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "C64": np.dtype("<c8"),
    "BOOL": np.dtype("?"),
}


def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return numpy's dtype for a name of safetensors, or None if there is none."""
    if dtype in _NUMPY:
        return _NUMPY[dtype]
    if dtype[0] in "IU":
        return np.dtype(f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    return None


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """Return the elements in ``data`` as another dtype.

    Args:
        data: Bytes of elements of dtype ``source``.
        source: One of ``ucp_core.numerics.dtypes.FLOATS``.
        target: Another of them.

    Returns:
        Bytes of elements of dtype ``target``; ``data`` itself if the dtypes are equal.
    """
    if source == target:
        return data
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if source == "BF16":
            wide = widen_bf16(np.frombuffer(data, np.dtype("<u2")))
            result: NDArray[Any] = wide if target == "F32" else wide.astype(_NUMPY[target])
        elif target == "BF16":
            result = _to_bf16(np.frombuffer(data, _NUMPY[source]))
        else:
            result = np.frombuffer(data, _NUMPY[source]).astype(_NUMPY[target])
    return memoryview(result.view(np.uint8).data)


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 of each bfloat16, exactly."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def _to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits = _odd_f32(values) if values.dtype == np.float64 else values.astype("<f4").view("<u4")
    upper = bits >> np.uint32(16)
    # Half of the last place, less one where that place is even: a tie goes up only if it is odd.
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Otherwise a payload in the lower bits would become infinity, and rounding could overflow.
    if is_nan.any():
        rounded = np.where(is_nan, upper | np.uint32(0x40), rounded)
    return rounded.astype("<u2")


def _odd_f32(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Return the bits of float32, rounded to odd: the last bit is set if anything was cut off.

    Rounding to nearest twice could round up twice; after rounding to odd, the second rounding
    still knows on which side of a tie the value lay.
    """
    near = values.astype("<f4")
    back = near.astype("<f8")
    bits = near.view("<u4").copy()
    bits -= (np.abs(back) > np.abs(values)).astype("<u4")
    bits |= ((back != values) & ~np.isnan(back)).astype("<u4")
    return bits


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
