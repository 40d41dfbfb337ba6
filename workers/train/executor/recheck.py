"""Detect silent data corruption: from time to time all workers compute and compare one micro-batch.

In deterministic mode equal weights and samples give the same bits on every worker. So all workers
sum the bits of their gradients before any reduction, and a worker with another sum has computed
something wrong. After a difference all workers compute the micro-batch again. This distinguishes a
faulty machine from kernels whose results vary, and shows which of two workers erred.

A bit of a weight that flips in memory would reach all workers alike. So each worker also checks
before an update that its shards are as the previous update left them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ucp_core.native import RECHECKED
from workers.errors import CorruptError
from workers.parallel import LocalShard, Mesh
from workers.settings import TrainSettings
from workers.train.executor.exchange import by_rank

log = logging.getLogger(__name__)

#: How many times to compute the micro-batch again after a difference.
_NUM_AGAIN: Final = 3
#: The integer dtype for each element size.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Recheck:
    """The checks of one attempt; every rank makes each call.

    ``read`` returns the samples of a micro-batch, by step and number.
    """

    def __init__(
        self,
        train: TrainSettings,
        mesh: Mesh,
        device: torch.device,
        *,
        read: Callable[[int, int], Any],
        restored: Mapping[str, Any],
        step: int,
    ) -> None:
        self._every, self._num_micro_batches = train.recheck, train.num_micro_batches
        self._last_step = train.steps
        self._mesh, self._device, self._read = mesh, device, read
        #: The newest step whose state is known to be right.
        self._sound_step: int = restored.get(RECHECKED, step)
        self._is_off = mesh.layout.world_size == 1
        self._sum = self._num_flips = torch.zeros((), dtype=torch.int64, device=device)
        self._left: Tensor | None = None
        if mesh.rank == 0 and self._is_off:
            log.warning("train.recheck compares nothing: there is one worker")

    def values(self) -> dict[str, Any]:
        """Return the values that a version keeps."""
        return {} if self._is_off else {RECHECKED: self._sound_step}

    def passes(self, step: int, shards: Sequence[LocalShard]) -> Iterator[tuple[int, Any]]:
        """Yield number and samples of a micro-batch, once for each time to compute it.

        The caller passes its gradients to ``see`` before it takes the next one. Raise
        ``CorruptError`` if a worker has computed something wrong, or has wrong weights.
        """
        if self._is_off or (step % self._every and step != self._last_step):
            return
        self.before_update(shards)
        number = step // self._every % self._num_micro_batches
        results: list[list[int]] = []
        while len(results) <= _NUM_AGAIN:
            yield number, self._read(step, number)
            sums, flips = self._of_all()
            flipped = tuple(rank for rank, num in enumerate(flips) if num)
            # A change on several ranks was made by the script.
            if len(flipped) == 1:
                told = f"weights of {_named(flipped)} changed in memory between two updates"
                raise self._error(step, told, flipped)
            if not results and len(set(sums)) == 1:
                # An error may begin after the check, in this same step.
                self._sound_step = step - 1
                return
            results.append(sums)
        odd = odd_results([*zip(*results, strict=True)])
        if odd is None:
            self._is_off = True
            if self._mesh.rank == 0:
                log.warning(
                    "train.recheck compares nothing from now on: workers get other gradients each "
                    "time they compute micro-batch %s of step %s. A kernel of the model is not "
                    "deterministic, or the loss draws numbers of its own",
                    number,
                    step,
                )
            return
        told = f"{_named(odd)} computed another gradient of micro-batch {number} than the others"
        if len(odd) == len(sums):
            told = (
                f"{_named(odd)} computed different gradients of micro-batch {number}, and which is "
                "right is not known: with one more worker it is"
            )
        raise self._error(step, told, odd)

    def see(self, values: Tensor) -> None:
        """Add a part of this rank's result."""
        self._sum = self._sum + sum_of_words(values)

    def before_update(self, shards: Sequence[LocalShard]) -> None:
        """Record whether the weights are as the last update left them."""
        if self._left is not None and not self._is_off:
            self._num_flips = self._num_flips + (self._left != _sum_of(shards))

    def after_update(self, shards: Sequence[LocalShard]) -> None:
        """Record a checksum of the weights."""
        if not self._is_off:
            self._left = _sum_of(shards)

    def _of_all(self) -> tuple[list[int], list[int]]:
        """Return, by rank, the sum of its results and how often its weights have changed."""
        found = by_rank(torch.stack([self._sum, self._num_flips]))
        self._sum = self._num_flips = torch.zeros_like(self._sum)
        return [row[0] for row in found], [row[1] for row in found]

    def _error(self, step: int, told: str, ranks: tuple[int, ...]) -> CorruptError:
        sound = self._sound_step
        return CorruptError(
            f"step {step}: {told}. The run goes back to its newest version up to step {sound}, "
            "whose state the last check confirmed",
            step=step,
            ranks=ranks,
            sound_step=sound,
        )


def odd_results(results: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
    """Return the ranks whose ``results`` differ from those of the others. Pure.

    Return all ranks if it is unknown which ones err, and None if the results of more than one rank
    vary: then the kernels vary, because faulty machines are rare.
    """
    varying = [rank for rank, own in enumerate(results) if len(set(own)) > 1]
    if len(varying) > 1:
        return None
    steady = Counter(own[0] for own in results if len(set(own)) == 1)
    ((usual, count), *others) = steady.most_common()
    # If one of two ranks once has the result of the other, it erred the other times.
    agrees = not others and any(usual in results[rank] for rank in varying)
    if not agrees and 2 * count <= len(results):
        return tuple(range(len(results)))
    return tuple(rank for rank, own in enumerate(results) if {*own} != {usual})


def sum_of_words(values: Tensor) -> Tensor:
    """Return the sum of all words as integers, which differs after any flipped bit."""
    flat = values.contiguous().reshape(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word or flat.numel() % per_word:
        return flat.view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
    # This takes 14 ms for 100 MB on a CPU, instead of 108 ms. The sum wraps around.
    return flat.view(torch.int64).sum()


def _sum_of(shards: Sequence[LocalShard]) -> Tensor:
    return torch.stack([sum_of_words(one.local) for one in shards]).sum()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
