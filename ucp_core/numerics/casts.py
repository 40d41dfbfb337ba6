"""Casts between float dtypes, bfloat16 included: one rounding, to nearest, ties to even.

As in IEEE 754, NaN stays NaN, infinities and zeros keep their sign, and too large values become
infinite. ml_dtypes would round float64 twice on the way to bfloat16 and float8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
            result: npt.NDArray[Any] = wide if target == "F32" else wide.astype(_NUMPY[target])
        elif target == "BF16":
            result = _to_bf16(np.frombuffer(data, _NUMPY[source]))
        else:
            result = np.frombuffer(data, _NUMPY[source]).astype(_NUMPY[target])
    return memoryview(result.view(np.uint8).data)


def widen_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 of each bfloat16, exactly."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def _to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    bits = _odd_f32(values) if values.dtype == np.float64 else values.astype("<f4").view("<u4")
    upper = bits >> np.uint32(16)
    # Half of the last place, less one where that place is even: a tie goes up only if it is odd.
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Otherwise a payload in the lower bits would become infinity, and rounding could overflow.
    if is_nan.any():
        rounded = np.where(is_nan, upper | np.uint32(0x40), rounded)
    return rounded.astype("<u2")


def _odd_f32(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
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
