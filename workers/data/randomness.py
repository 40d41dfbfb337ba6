"""Seeds the random numbers of torch, NumPy and Python, so that they do not depend on the worker."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def random_seed(*parts: object) -> int:
    """Return a seed below 2 ** 63 that depends on all parts: the run's seed, step, micro-batch."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators; ``seed`` is below 2 ** 63."""
    # ``torch.manual_seed`` would take 0.1 ms to look for devices of all kinds.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    # Scripts and their libraries use NumPy's global generator, not one of ours.
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def drawn() -> tuple[object, ...]:
    """Return the state of the generators on the CPU, which changes when a number is drawn."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, of_numpy[1].tobytes(), of_numpy[2:], random.getstate()


@contextmanager
def keeping_host_numbers() -> Iterator[None]:
    """Restore NumPy's and Python's generators afterwards."""
    generator, of_python = np.random.mtrand.get_bit_generator(), random.getstate()
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.mtrand.set_bit_generator(generator)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators, then restore them, so that the script's own numbers do not change."""
    of_torch = torch.default_generator.get_state()
    of_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with keeping_host_numbers():
        try:
            seed_all(seed)
            yield
        finally:
            torch.default_generator.set_state(of_torch)
            if of_device is not None:
                torch.cuda.set_rng_state(of_device)


@contextmanager
def numbers_of_stage(number: int) -> Iterator[None]:
    """Let a pipeline stage draw its own numbers in a pass, then restore the script's numbers.

    The first stage draws the numbers that the whole model would draw.
    """
    if number == 0:
        yield
        return
    with seeded(random_seed(torch.default_generator.initial_seed(), number)):
        yield


def draw_for_part(number: int) -> None:
    """Draw separate numbers for a part of sequences from here on, not for whole sequences.

    The first part draws the numbers that whole sequences would draw.
    """
    if number:
        seed_all(random_seed(torch.default_generator.initial_seed(), "part", number))


class Keyed:
    """Calls functions as ``seeded`` would, 60 us faster.

    Meanwhile NumPy draws from a separate generator, so that the script's need not be copied. Only
    the second of a pair of normal numbers is lost, if NumPy kept one for the script.
    """

    def __init__(self) -> None:
        self._generator = np.random.MT19937(0)

    def __call__(
        self, seed: int, function: Callable[[_Argument], _Result], of: _Argument
    ) -> _Result:
        """Return ``function(of)``."""
        of_numpy, of_python = np.random.mtrand.get_bit_generator(), random.getstate()
        of_torch = torch.default_generator.get_state()
        np.random.mtrand.set_bit_generator(self._generator)
        try:
            seed_all(seed)
            return function(of)
        finally:
            np.random.mtrand.set_bit_generator(of_numpy)
            random.setstate(of_python)
            torch.default_generator.set_state(of_torch)
