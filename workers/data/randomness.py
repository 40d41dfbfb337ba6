"""Random numbers of torch, NumPy and Python that depend on a seed, and not on the worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["keeping_host_numbers", "random_seed", "seed_all", "seeded"]


def random_seed(*parts: object) -> int:
    """Return a seed below 2 ** 63 that depends on all parts: the run's seed, step, micro-batch."""
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators; ``seed`` is below 2 ** 63."""
    # Not ``torch.manual_seed``: it takes 0.1 ms to look for devices of all kinds.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    # Scripts and their libraries use NumPy's global generator, not one of ours.
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


@contextmanager
def keeping_host_numbers() -> Iterator[None]:
    """Leave NumPy's and Python's generators as they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators, and leave them as they were: the script's own numbers do not change."""
    with keeping_host_numbers(), torch.random.fork_rng(devices=[]):
        seed_all(seed)
        yield
