"""Buffers are the same in every attempt, and seldom need the whole model."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workers.train.loading.filling import initial_values


class Rotary(nn.Module):
    """A buffer that is computed from sizes, beside parameters that are random."""

    initialised = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.linear.weight
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 4), persistent=False)
        Rotary.initialised += not self.linear.weight.is_meta


class Drawn(Rotary):
    """A buffer of random numbers, which follow those of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(3))


class DrawnByNumpy(Rotary):
    """The same, by NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.from_numpy(np.random.rand(3)))  # noqa: NPY002


class Derived(Rotary):
    """A buffer that has the values of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copied", self.linear.weight.detach().clone())


class Looking(Rotary):
    """A buffer that needs a parameter's value as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(self.linear.bias.abs().max().item()))


def only_buffers(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if not name.startswith(("linear", "ag"))}


@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [(Rotary, 0), (Drawn, 1), (DrawnByNumpy, 1), (Derived, 1), (Looking, 1)],
)
def test_buffers_are_those_of_the_whole_model(kind: type[Rotary], is_whole: int) -> None:
    """An attempt that resumes must have those that the run began with."""
    whole = initial_values(kind, 5, with_weights=True)
    Rotary.initialised = 0
    found = initial_values(kind, 5, with_weights=False)

    assert Rotary.initialised == is_whole
    assert only_buffers(found).keys() == only_buffers(whole).keys()
    assert all(torch.equal(found[name], whole[name]) for name in only_buffers(whole))


def test_the_scripts_own_random_numbers_go_on() -> None:
    """They are its own in every attempt."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)

    seed()
    undisturbed = draw()
    seed()
    initial_values(DrawnByNumpy, 5, with_weights=False)

    assert draw() == undisturbed
