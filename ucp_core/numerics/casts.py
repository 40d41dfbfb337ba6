"""Casts between float dtypes, including bfloat16 and float8: one rounding, ties to even.

As in IEEE 754, NaN stays NaN, infinities and zeros keep their sign, and values that are too large
become infinite (NaN in F8_E4M3, which has no infinity).
"""

from typing import Any

import ml_dtypes
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
#: Dtypes that numpy itself lacks.
_SMALL: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return numpy's dtype for a safetensors name, or None if there is none."""
    if dtype in _NUMPY:
        return _NUMPY[dtype]
    if dtype[0] in "IU":
        return np.dtype(f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    return None


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """Return the elements in ``data`` as another dtype.

    Args:
        data: Bytes of elements of dtype ``source``.
        source: One of ``ucp_core.numerics.FLOATS``.

    Returns:
        Bytes of elements of dtype ``target``; ``data`` itself if the dtypes are equal.
    """
    if source == target:
        return data
    values = np.frombuffer(data, _NUMPY.get(source) or _SMALL[source])
    return memoryview(_cast(values, target).view(np.uint8).data)


def decode(dtype: str, data: memoryview) -> NDArray[np.float64]:
    """Return the elements of ``data`` of a floating ``dtype``; a complex number is two elements."""
    if dtype == "C64":
        return decode("F32", data)
    if dtype not in FLOATS and dtype not in _SMALL:
        raise CheckpointCorruptError(
            f"{dtype} has no mean: only floating dtypes can be averaged", dtype=dtype
        )
    return _cast(np.frombuffer(data, _NUMPY.get(dtype) or _SMALL[dtype]), "F64")


def encode(dtype: str, values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the bytes of ``values`` as elements of ``dtype``, rounded once."""
    return _cast(values, "F32" if dtype == "C64" else dtype).view(np.uint8)


def _cast(values: NDArray[Any], target: str) -> NDArray[Any]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if target not in _SMALL:
            return values.astype(_NUMPY[target])
        # ml_dtypes goes through float32, and would therefore round a float64 twice.
        return (_odd_f32(values) if values.dtype == np.float64 else values).astype(_SMALL[target])


def _odd_f32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return float32, rounded to odd: the last bit is set if anything was cut off.

    Rounding to nearest twice could round up twice; after rounding to odd, the second rounding
    still knows on which side of a tie the value lay.
    """
    near = values.astype("<f4")
    back = near.astype("<f8")
    bits = near.view("<u4").copy()
    bits -= (np.abs(back) > np.abs(values)).astype("<u4")
    bits |= ((back != values) & ~np.isnan(back)).astype("<u4")
    return bits.view("<f4")
