"""Gradients are scaled on their device, to the bits of the same arithmetic on the host."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ucp_core.geometry import Box
from workers.parallel import LocalShard
from workers.train.executor.norm import ordered_sum, row_squares, scale_gradients

CPU = torch.device("cpu")


def shard(gradient: torch.Tensor, start: tuple[int, ...] = (0,)) -> LocalShard:
    """Return a shard with a gradient as FSDP2 leaves it, which has a local part."""
    parameter: Any = SimpleNamespace(grad=SimpleNamespace(_local_tensor=gradient))
    shape = tuple(gradient.shape)
    return LocalShard(
        fqn="w",
        shape=shape,
        boxes=(Box(start, tuple(map(sum, zip(start, shape, strict=True)))),),
        replicas=(0,),
        parameter=parameter,
        local=gradient,
    )


def on_the_host(square: float, tokens: int, clip_norm: float) -> float:
    """Return the factor; a norm that is not a number clips nothing."""
    weight = 1.0 / max(1, tokens)
    if not clip_norm:
        return weight
    return weight * min(1.0, clip_norm / (math.sqrt(square) * weight + 1e-6))


@given(
    square=st.one_of(st.floats(0.0, 1e30), st.sampled_from([math.inf, math.nan])),
    tokens=st.integers(0, 2**40),
    clip_norm=st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
)
def test_the_bits_are_those_of_the_host(square: float, tokens: int, clip_norm: float) -> None:
    """Else a run on GPUs would end elsewhere than the same one before."""
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(tokens))
    expected = gradient * on_the_host(square, tokens, clip_norm)
    one = shard(gradient.clone())
    numbers = torch.tensor([square, tokens], dtype=torch.float64)

    scale_gradients([one], numbers[0], numbers[1], clip_norm)

    assert one.gradient is not None
    assert torch.equal(one.gradient.view(torch.int32), expected.view(torch.int32))


def test_no_number_is_read_from_the_device() -> None:
    """Reading one waits for all that the device was asked for."""
    with FakeTensorMode():
        square = torch.zeros((), dtype=torch.float64, device="cuda")
        tokens = torch.ones((), dtype=torch.float64, device="cuda")
        one = shard(torch.zeros(4, device="cuda"))
        with pytest.raises(RuntimeError):
            square.item()

        scale_gradients([one], square, tokens, 1.0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_square_of_a_row_does_not_depend_on_how_many_rows_a_rank_has(threads: int) -> None:
    """torch adds up a single long row in as many parts as there are threads."""
    before = torch.get_num_threads()
    gradient = torch.randn(7, 70_001, generator=torch.Generator().manual_seed(1))
    shapes = {"w": (7, 70_001)}
    torch.set_num_threads(threads)
    try:
        whole = row_squares([shard(gradient, (0, 0))], shapes, 0, CPU)
        parts = [
            row_squares([shard(gradient[row : row + 1], (row, 0))], shapes, 0, CPU)
            for row in range(7)
        ]
    finally:
        torch.set_num_threads(before)

    assert torch.equal(whole, sum(parts))  # type: ignore[arg-type]  # zeros and one number each
    expected = gradient.double().square().sum(dim=1)
    assert whole.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_norm_does_not_depend_on_the_order_in_which_an_all_reduce_adds_columns(
    seed: int,
) -> None:
    """With tp=4 a row has four addends, and which rank's comes first depends on the world size."""
    gradient = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)).exp()
    ranks = [
        row_squares([shard(part, (0, 2 * tp))], {"w": (64, 8)}, 0, CPU, (tp, 4))
        for tp, part in enumerate(gradient.split(2, dim=1))
    ]
    found = set()
    for first in range(4):
        rows = ranks[first].clone()
        for other in range(first + 1, first + 4):
            rows += ranks[other % 4]
        found.add(ordered_sum(rows).item())

    assert len(found) == 1
    assert found.pop() == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)
