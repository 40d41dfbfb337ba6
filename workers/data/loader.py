"""Batches of a dataset in the run's order, read ahead by processes.

What a step sees depends on seed and step alone: any number of workers reads it, and a run that
resumes begins at its step without reading what was before. Random numbers of the dataset
(augmentation, masking) are keyed by step and micro-batch, so they are the same everywhere, too.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workers.data.order import DataOrder
from workers.data.randomness import random_seed, seed_all, seeded
from workers.errors import DataError
from workers.parent_death import end_with_parent

__all__ = ["DataLoader", "Dataset", "micro_batches_of"]

#: Batches that each process reads ahead.
_AHEAD: Final = 2
#: The order of so many samples is computed together.
_SAMPLES_AT_ONCE: Final = 4096


class Dataset(Protocol):
    """What can be read: torch's and Hugging Face's map-style datasets, lists, arrays."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


def micro_batches_of(
    order: DataOrder, *, micro_batch: int, numbers: Sequence[int], first_step: int = 1
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield step, number and samples, ``(micro_batch,)``, of a rank's micro-batches without end.

    Args:
        order: The order of samples.
        micro_batch: Samples of a micro-batch.
        numbers: Which micro-batches of each step the rank computes, in order.
        first_step: The first step, from 1.
    """
    offsets = np.asarray(numbers, np.int64)[:, None] * micro_batch + np.arange(micro_batch)
    # The first batch must not wait for many; later it is cheaper to ask for many steps at once.
    num_steps, num_steps_max = 1, max(1, _SAMPLES_AT_ONCE // max(1, offsets.size))
    while True:
        steps = np.arange(first_step, first_step + num_steps)
        starts = (steps - 1) * order.global_batch
        # A rank repeats micro-batches to keep pace, so its own are not always in order.
        positions, back = np.unique(starts[:, None, None] + offsets, return_inverse=True)
        samples = order.at(positions)[back.reshape(num_steps, *offsets.shape)]
        for step, of_step in zip(steps.tolist(), samples, strict=True):
            for number, indices in zip(numbers, of_step, strict=True):
                yield step, number, indices
        first_step += num_steps
        num_steps = min(2 * num_steps, num_steps_max)


class DataLoader:
    """Batches of a dataset for ``session.steps``.

    Make it outside of the training function, and its processes live from attempt to attempt.

    Args:
        dataset: Samples by index below ``len(dataset)``. ``__getitems__(indices)`` is used if it
            has that.
        collate_fn: Makes a batch of a list of samples; by default torch's, which stacks tensors.
        num_workers: Processes that read ahead, forked from this one; 0 reads when it is needed.
        digest: Identifies the data. Workers, and a run and its checkpoint, must have the same.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        digest: str = "",
    ) -> None:
        if not len(dataset):
            raise DataError("DataLoader: the dataset has no samples")
        if num_workers < 0:
            raise DataError(f"DataLoader: num_workers={num_workers} must be at least 0")
        self.dataset = dataset
        self.digest = digest
        self._collate = collate_fn or torch.utils.data.default_collate
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def batches(
        self,
        order: DataOrder,
        *,
        seed: int,
        micro_batch: int,
        numbers: Sequence[int],
        first_step: int = 1,
    ) -> Generator[Any]:
        """Yield one rank's batches, step after step, without end.

        Args:
            order: The order of samples.
            seed: Seed of the dataset's random numbers.
            micro_batch: Samples of a batch.
            numbers: Which micro-batches of each step this rank computes, in order.
            first_step: The step of the first batch, from 1.

        Raises:
            DataError: A process that reads died, or the dataset raised; says which sample.
        """
        upcoming = (
            (random_seed("data", seed, step, number), samples.tolist())
            for step, number, samples in micro_batches_of(
                order, micro_batch=micro_batch, numbers=numbers, first_step=first_step
            )
        )
        if not self._num_workers:
            for key, indices in upcoming:
                with seeded(key):
                    batch = _read(self.dataset, self._collate, indices)
                yield batch
        ahead: deque[Future[Any]] = deque()
        try:
            while True:
                while len(ahead) < _AHEAD * self._num_workers:
                    ahead.append(self._submit(*next(upcoming)))
                try:
                    batch = ahead.popleft().result()
                except BrokenProcessPool as error:
                    self._pool = None
                    raise DataError(
                        "DataLoader: a process that reads data has died (out of memory?); lower "
                        "num_workers, or read in the training process with num_workers=0"
                    ) from error
                yield batch
        finally:
            for one in ahead:
                one.cancel()

    def _submit(self, key: int, indices: list[int]) -> Future[Any]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(self.dataset, self._collate),
            )
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool.submit(_read_keyed, key, indices)


class _Process:
    """What a reading process reads."""

    dataset: Dataset
    collate: Callable[[list[Any]], Any]


def _begin(dataset: Dataset, collate: Callable[[list[Any]], Any]) -> None:
    end_with_parent()
    _close_sockets()
    torch.set_num_threads(1)
    _Process.dataset, _Process.collate = dataset, collate


def _close_sockets() -> None:
    """Close the connections of the training process: peers must see when it leaves."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The listing's own descriptor is closed by now.
        with suppress(OSError):
            if entry.is_socket():
                os.close(int(entry.name))


def _read_keyed(key: int, indices: list[int]) -> Any:
    seed_all(key)
    return _read(_Process.dataset, _Process.collate, indices)


def _read(dataset: Dataset, collate: Callable[[list[Any]], Any], indices: Sequence[int]) -> Any:
    many = getattr(dataset, "__getitems__", None)
    return collate(many(indices) if many is not None else [dataset[index] for index in indices])
