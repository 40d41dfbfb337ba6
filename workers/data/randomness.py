"""Random numbers of torch, NumPy and Python that depend on a seed, and not on the worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from workers.data.host_numbers import host_numbers, put_back

__all__ = ["Keyed", "keeping_host_numbers", "random_seed", "seed_all", "seeded"]

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def random_seed(*parts: object) -> int:
    """Return a seed below 2 ** 63 that depends on all parts: the run's seed, step, micro-batch."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators; ``seed`` is below 2 ** 63."""
    _seed_torch(seed)
    # Scripts and their libraries use NumPy's global generator, not one of ours.
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def _seed_torch(seed: int) -> None:
    # Not ``torch.manual_seed``: it takes 0.1 ms to look for devices of all kinds.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def keeping_host_numbers() -> Iterator[None]:
    """Leave NumPy's and Python's generators as they were."""
    before = host_numbers()
    try:
        yield
    finally:
        put_back(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators, and leave them as they were: the script's own numbers do not change."""
    of_torch = torch.default_generator.get_state()
    with keeping_host_numbers():
        try:
            seed_all(seed)
            yield
        finally:
            torch.default_generator.set_state(of_torch)


class Keyed:
    """Calls functions as ``seeded`` would, in less time if they draw no random numbers.

    To seed NumPy and Python takes as long as to read a small batch. They are seeded at the first
    call, and from then on if that call drew from them. If a later one does so after all, it is made
    again, seeded, and what it drew is put back. Who looks at NumPy's or Python's state and does not
    draw may see the script's.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None

    def __call__(
        self, seed: int, function: Callable[[_Argument], _Result], of: _Argument
    ) -> _Result:
        """Return ``function(of)``."""
        before, of_torch = host_numbers(), torch.default_generator.get_state()
        is_same = False
        try:
            if self._draws is False:
                _seed_torch(seed)
                try:
                    result = function(of)
                except Exception:
                    is_same = host_numbers() == before
                    if is_same:
                        raise
                else:
                    is_same = host_numbers() == before
                    if is_same:
                        return result
            seed_all(seed)
            begun = None if self._draws else host_numbers()
            result = function(of)
            self._draws = self._draws or begun != host_numbers()
            return result
        finally:
            torch.default_generator.set_state(of_torch)
            if not is_same:
                put_back(before)
