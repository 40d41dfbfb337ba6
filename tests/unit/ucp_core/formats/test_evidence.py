"""Masters are found by rounding them as torch does."""

import pytest
import torch

from ucp_core.formats.shared.evidence import rounded

#: Ties, the largest that stays finite, the smallest that is not zero, and what is beyond them.
EDGES = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.996, 65520.0, -65520.0, 3.4e38]
EDGES += [2**-24, 2**-25, 2**-25 * 1.0001, float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_floats_are_rounded_bit_by_bit_as_torch_rounds_them(dtype: str) -> None:
    """One bit of difference, and a parameter is not found."""
    kind = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=torch.manual_seed(3))
    values = torch.cat([torch.tensor(EDGES), bits.to(torch.int32).view(torch.float32)])
    values = values[~values.isnan()]

    found = rounded(values.numpy().tobytes(), "F32", dtype)

    assert found == values.to(kind).view(torch.uint8).numpy().tobytes()


def test_what_is_not_a_number_stays_so() -> None:
    """Rounding the payload up could make it infinite, or carry into the sign."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**31) + 0x7F800001], dtype=torch.int64)
    data = bits.to(torch.int32).numpy().tobytes()

    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        found = torch.frombuffer(bytearray(rounded(data, "F32", dtype)), dtype=kind)
        assert found.isnan().all()
