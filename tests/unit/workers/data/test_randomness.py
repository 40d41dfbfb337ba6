"""What leaves the generators of the host as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workers.data import keeping_host_numbers


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
