"""Reads the order of samples that a script gives, epoch by epoch."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from workers.data.randomness import random_seed, seeded
from workers.errors import DataError

#: A function of the epoch's number, or an iterable as torch takes it, perhaps with ``set_epoch``.
Sampler: TypeAlias = Callable[[int], Sequence[int]] | Iterable[int]
#: A step may span two epochs.
_KEPT: Final = 2


class Sampled:
    """The epochs of a sampler.

    Random numbers of torch, NumPy and Python are seeded by the run's seed and the epoch, so an
    epoch is the same on every worker and after a resume.
    """

    def __init__(self, sampler: Any, num_samples: int) -> None:
        self._name = getattr(sampler, "__name__", type(sampler).__name__)
        if isinstance(sampler, torch.utils.data.DistributedSampler) or hasattr(
            sampler, "num_replicas"
        ):
            raise DataError(
                f"DataLoader: the sampler {self._name} gives a rank only its part, but the run "
                "divides each step between the workers: pass one that gives the indices of all"
            )
        if not callable(sampler) and not isinstance(sampler, Iterable):
            raise DataError(
                f"DataLoader: sampler={sampler!r} gives no indices: pass a sampler of torch, "
                "or a function that returns the indices of an epoch by its number"
            )
        self._sampler, self._num_samples = sampler, num_samples
        self._seed = 0
        self._kept: dict[int, NDArray[np.int64]] = {}

    def begin(self, seed: int) -> NDArray[np.int64]:
        """Return the first epoch under a seed."""
        self._seed, self._kept = seed, {}
        first = self.epoch(0)
        if not np.array_equal(first, self._drawn(0)):
            raise DataError(
                f"the sampler {self._name} gives a different order for the same epoch, "
                "so a run that resumes would lose samples: leave out its generator "
                "(torch, NumPy and random are seeded by the epoch here), or seed it in "
                "set_epoch(epoch)"
            )
        return first

    def epoch(self, number: int) -> NDArray[np.int64]:
        """Return the indices of an epoch, in order."""
        if number not in self._kept:
            found = self._drawn(number)
            expected = next((len(one) for one in self._kept.values()), len(found))
            if len(found) != expected:
                raise DataError(
                    f"the sampler {self._name} gives {len(found)} indices in epoch {number} "
                    f"and {expected} in others: give the same number in each"
                )
            while len(self._kept) >= _KEPT:
                del self._kept[min(self._kept)]
            self._kept[number] = found
        return self._kept[number]

    def digest(self) -> int:
        """Return an identity of the first epoch's order; not 0."""
        return zlib.crc32(self.epoch(0).tobytes()) or 1

    def _drawn(self, number: int) -> NDArray[np.int64]:
        sampler = self._sampler
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(number)
        with seeded(random_seed("sampler", self._seed, number)):
            given = list(sampler(number) if callable(sampler) else sampler)
        found = np.array(given) if given else np.empty(0, np.int64)
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
            raise DataError(
                f"the sampler {self._name} gives {given[0]!r}, which is not an index: the run "
                "makes the batches, so pass a sampler of single samples"
            )
        outside = found[(found < 0) | (found >= self._num_samples)]
        if not len(found) or len(outside):
            what = f"the index {outside[0]}" if len(outside) else "no index"
            raise DataError(
                f"the sampler {self._name} gives {what} in epoch {number}, and the data has "
                f"{self._num_samples} samples"
            )
        return found.astype(np.int64)
