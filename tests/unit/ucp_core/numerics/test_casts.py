"""Every cast rounds once, to nearest, and loses no NaN."""

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucp_core.numerics import FLOATS, cast, numpy_dtype

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)


def _bits(values: npt.NDArray[np.generic], source: str, target: str) -> npt.NDArray[np.generic]:
    data = cast(memoryview(values.tobytes()), source, target)
    return np.frombuffer(data, {8: "<u8", 4: "<u4", 2: "<u2"}[len(data) // len(values)])


def _torch_bits(values: npt.NDArray[np.generic], source: str, target: str) -> torch.Tensor:
    tensor = torch.frombuffer(bytearray(values.tobytes()), dtype=TORCH[source])
    return tensor.to(TORCH[target])


def _samples(source: str) -> npt.NDArray[np.generic]:
    """Return bit patterns that meet every case: all of 2 bytes, and all upper halves of 4."""
    if source in {"F16", "BF16"}:
        return ALL_BF16
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    f32 = (ALL_BF16.astype(np.uint32)[:, None] << 16 | tails).ravel()
    if source == "F32":
        return f32
    with np.errstate(all="ignore"):
        return f32.view(np.float32).astype(np.float64).view(np.uint64)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_are_those_of_torch(source: str, target: str) -> None:
    """All bfloat16 and float16, and every float32 around a tie; NaN compares as NaN."""
    values = _samples(source)

    ours = torch.frombuffer(
        bytearray(cast(memoryview(values.tobytes()), source, target)), dtype=TORCH[target]
    )
    theirs = _torch_bits(values, source, target)

    both_nan = torch.isnan(ours) & torch.isnan(theirs)
    same = (ours == theirs) & (torch.signbit(ours) == torch.signbit(theirs))
    assert bool((same | both_nan).all())
    assert int(torch.isnan(ours).sum()) == int(torch.isnan(theirs).sum())


@given(value=st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_a_float64_is_rounded_once_to_bfloat16(value: float) -> None:
    """By way of float32 a value just above a tie would be rounded down to it, and then to even."""
    _assert_nearest(value)


@pytest.mark.parametrize("exponent", [-140, -126, -1, 0, 5, 127])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_a_float64_beside_a_tie_is_rounded_once(exponent: int, odd: int, side: int) -> None:
    """Random values never lie a last place of float64 beside the middle of two bfloat16."""
    middle = (1 + odd / 128 + 1 / 256) * 2.0**exponent
    _assert_nearest(float(np.nextafter(middle, side * np.inf)) if side else middle)


def _assert_nearest(value: float) -> None:
    found = int(_bits(np.array([value]), "F64", "BF16")[0])
    sign, magnitude = found & 0x8000, found & 0x7FFF
    assert bool(sign) == (np.signbit(value) == 1)
    if magnitude == 0x7F80:
        # The middle between the largest finite one and the next power of two goes to infinity.
        assert abs(Fraction(value)) >= Fraction(2) ** 128 - Fraction(2) ** 119
        return
    around = _widened(np.arange(max(magnitude - 1, 0), magnitude + 2, dtype=np.uint16))
    error = abs(abs(Fraction(value)) - _exact(magnitude))
    for other, candidate in zip(around, range(max(magnitude - 1, 0), magnitude + 2), strict=True):
        if np.isfinite(other) and candidate != magnitude:
            theirs = abs(abs(Fraction(value)) - Fraction(float(other)))
            assert error < theirs or (error == theirs and magnitude % 2 == 0)


def _exact(magnitude: int) -> Fraction:
    return Fraction(float(_widened(np.array([magnitude], dtype=np.uint16))[0]))


def _widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return np.frombuffer(cast(bits.data.cast("B"), "BF16", "F32"), np.float32)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_a_nan_keeps_its_sign_and_stays_one(bits: int) -> None:
    """Its payload can lie in the bits that are cut off, and rounding it up turns it to zero."""
    found = int(_bits(np.array([bits], dtype=np.uint32), "F32", "BF16")[0])

    assert found >> 15 == bits >> 31
    assert found & 0x7FFF > 0x7F80


def test_every_dtype_of_numpy_has_its_name() -> None:
    """The others are compared by their bits."""
    assert numpy_dtype("I16") == np.int16
    assert numpy_dtype("U64") == np.uint64
    assert numpy_dtype("BOOL") == np.bool_
    assert numpy_dtype("C64") == np.complex64
    assert numpy_dtype("BF16") is None
    assert numpy_dtype("F8_E4M3") is None
