"""Functions that leave the generators of the host as they were."""

import random

import numpy as np
import pytest
import torch

from workers.data import draw_for_part, keeping_host_numbers, seed_all


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64, np.random.Philox])
@pytest.mark.parametrize("num_before", [0, 1, 623, 624])
def test_numbers_go_on_as_they_were(generator: type, num_before: int) -> None:
    """Whichever generator of NumPy's the script uses, and between the two of a pair."""

    def normal() -> list[float]:
        return [random.gauss(), float(np.random.standard_normal())]  # noqa: NPY002

    def numbers(num_between: int) -> list[float]:
        np.random.mtrand.set_bit_generator(generator(7))
        random.seed(7)
        for _ in range(num_before):
            normal()
        with keeping_host_numbers():
            for _ in range(num_between):
                normal()
            if num_between:
                np.random.mtrand.set_bit_generator(np.random.MT19937(1))
        return normal() + normal() + [random.random()]

    before = np.random.mtrand.get_bit_generator()
    try:
        assert numbers(1) == numbers(625) == numbers(0)
    finally:
        np.random.mtrand.set_bit_generator(before)


def test_parts_draw_other_numbers_behind_the_cut_alone() -> None:
    """Noise and masks are drawn for whole sequences; of other tokens other weights are dropped."""
    wholes: list[float] = []
    others: list[tuple[float, float, float]] = []
    for number in range(3):
        seed_all(7)
        wholes.append(torch.rand(()).item())
        draw_for_part(number)
        others.append((torch.rand(()).item(), random.random(), np.random.rand()))  # noqa: NPY002

    assert len(set(wholes)) == 1
    assert [len(set(each)) for each in zip(*others, strict=True)] == [3, 3, 3]
