"""Which of several copies of a state is the odd one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.fake_ranks import built_of
from ucp_core.layout import ParallelLayout
from workers.errors import DivergedError
from workers.parallel import ModelPlan
from workers.train.boundary.replicas import odd_ones, refuse_diverged
from workers.train.executor import sum_of_words


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
    before = sum_of_words(values)

    for bit in range(8 * values.element_size()):
        flipped = values.contiguous()
        flipped.view(torch.uint8)[2, bit // 8] ^= 1 << bit % 8
        assert sum_of_words(flipped) != before


@pytest.mark.parametrize("is_other_kind", [True, False])
def test_copies_on_machines_of_different_kinds_are_brought_together(
    monkeypatch: pytest.MonkeyPatch, *, is_other_kind: bool
) -> None:
    """They round differently in each update, and of three the odd one's node was struck."""

    def sum_up(result: Tensor, *_args: Any, **_how: Any) -> None:
        if result.shape == (3, 2):
            result[1:] = result[0]
            result[1:, 0] += 1
            result[2, 1] += is_other_kind

    def broadcast(result: Tensor, *_args: Any, **_how: Any) -> None:
        result.fill_(7.0)

    layout = ParallelLayout(dp_replicate=3)
    built: Any = built_of(lambda: nn.Linear(2, 2), ModelPlan(), layout, rank=0, attempt=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_reduce", sum_up)
            patch.setattr(dist, "broadcast", broadcast)
            if is_other_kind:
                refuse_diverged(2, built)
                assert all((one.local == 7.0).all() for one in built.shards)
            else:
                with pytest.raises(DivergedError, match="those of rank 0: "):
                    refuse_diverged(2, built)
    finally:
        dist.destroy_process_group()
