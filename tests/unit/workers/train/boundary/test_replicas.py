"""Which of several copies of a state is the odd one."""

from __future__ import annotations

import pytest
import torch

from ucp_core.layout import ParallelLayout
from workers.train.boundary.replicas import _sum_of_words, odd_ones


@pytest.mark.parametrize(
    ("layout", "sums", "odd"),
    [
        (ParallelLayout(dp_replicate=3), [7, 7, 7], ()),
        (ParallelLayout(dp_replicate=3), [7, 8, 7], (1,)),
        (ParallelLayout(dp_replicate=2), [7, 8], (0, 1)),
        (ParallelLayout(dp_replicate=3), [7, 8, 9], (0, 1, 2)),
        (ParallelLayout(dp_replicate=3, dp_shard=2), [1, 2, 1, 2, 1, 3], (5,)),
        (ParallelLayout(pp=2, dp_replicate=2), [1, 1, 2, 3], (2, 3)),
    ],
    ids=str,
)
def test_the_odd_copy_is_named(
    layout: ParallelLayout, sums: list[int], odd: tuple[int, ...]
) -> None:
    """Shards differ from each other: only copies of one shard are compared."""
    assert odd_ones(layout, sums) == odd


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)[:, 1:5]
    before = _sum_of_words(values)

    for bit in range(8 * values.element_size()):
        flipped = values.contiguous()
        flipped.view(torch.uint8)[2, bit // 8] ^= 1 << bit % 8
        assert _sum_of_words(flipped) != before
