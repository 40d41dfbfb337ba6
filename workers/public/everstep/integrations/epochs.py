"""Trainer's epochs, batches and steps, and the matching dataset for ``session.steps``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep import TaskError


@dataclass(frozen=True, slots=True)
class Epoch:
    """A pass over the data in Trainer's batches and steps."""

    taken: int  #: Number of samples in it.
    num_batches: int  #: Number of batches; the last one may be short.
    num_micro_batches: int  #: Batches of a step; the last step of an epoch may have fewer.
    micro_batch: int  #: Number of samples in a batch.

    @classmethod
    def of(cls, trainer: Any, micro_batch: int, num_micro_batches: int) -> Epoch:
        """Return the epochs of a trainer with ``num_micro_batches`` batches a step."""
        number = len(trainer.train_dataset)
        drops = trainer.args.dataloader_drop_last
        num_batches = number // micro_batch if drops else math.ceil(number / micro_batch)
        if not num_batches:
            raise TaskError(
                f"ElasticTrainer: args.dataloader_drop_last leaves none of {number} samples in "
                f"batches of {micro_batch}"
            )
        taken = min(number, num_batches * micro_batch)
        return cls(taken, num_batches, num_micro_batches, micro_batch)

    @property
    def num_steps(self) -> int:
        """Return the steps of an epoch."""
        return math.ceil(self.num_batches / self.num_micro_batches)

    @property
    def num_positions(self) -> int:
        """Return the number of positions of the data order in an epoch; see ``DataOrder``."""
        return self.num_steps * self.num_micro_batches * self.micro_batch

    def at(self, step: int) -> float:
        """Return how many epochs are done after a step."""
        epochs, steps = divmod(step - 1, self.num_steps)
        return epochs + min((steps + 1) * self.num_micro_batches, self.num_batches) / (
            self.num_batches
        )


class Batch(list[Any]):
    """The samples of a batch; ``num_samples`` is 0 for a placeholder."""

    num_samples: int


class Samples:
    """A dataset that is read by many indices at once; -1 stands for no sample."""

    def __init__(self, dataset: Any, read: Callable[[Sequence[int]], list[Any]]) -> None:
        self._dataset, self._read = dataset, read

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        there = [index for index in indices if index >= 0]
        # Every worker computes the same number of batches, so one without samples uses any sample.
        found = Batch(self._read(there or [0]))
        found.num_samples = len(there)
        return found
