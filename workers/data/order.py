"""Computes the samples of a step as a pure function of (seed, step).

The order is an endless sequence of positions. Position ``p`` is in epoch ``p // num_samples``, and
each epoch is its own permutation of all samples, or the order that a sampler gives for it; a step
may span two epochs. Step ``s``, counted from 1, takes ``global_batch`` positions starting at ``(s -
1) * global_batch``. Nothing depends on the number of workers.

A permutation is a keyed Feistel network on the smallest even number of bits that holds
``num_samples``, repeated until the value is in range (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"): constant memory, at most 4 rounds expected.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS: Final = 6
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The order of ``num_samples`` samples under ``seed``, cut into steps."""

    seed: int  #: Selects the order.
    num_samples: int  #: Number of samples, at least 1; a sample is an index below this.
    global_batch: int  #: Samples per step, at least 1; may exceed ``num_samples``.
    #: Number of samples in an epoch, and number of its positions. Positions beyond the samples hold
    #: none (-1), so that an epoch ends with a step. None: all samples, and as many positions.
    epoch: tuple[int, int] | None = None
    #: Returns the samples of an epoch, instead of a permutation of all; requires ``epoch``.
    given: Callable[[int], NDArray[np.int64]] | None = None

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "an order needs at least one sample"
        assert self.global_batch >= 1, "a step needs at least one sample"
        if self.epoch is not None:
            taken, length = self.epoch
            most = length if self.given is not None else min(self.num_samples, length)
            assert 1 <= taken <= most, f"an epoch of {self.epoch}"

    def positions(self, step: int) -> tuple[int, int]:
        """Return the half-open range of positions that ``step`` (from 1) takes."""
        assert step >= 1, f"steps count from 1, not {step}"
        return (step - 1) * self.global_batch, step * self.global_batch

    def step(self, step: int) -> NDArray[np.int64]:
        """Return the samples of ``step`` in order, ``(global_batch,)``."""
        return self.samples(*self.positions(step))

    def samples(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at the positions ``start <= p < stop``, in order."""
        return self.at(np.arange(start, max(start, stop), dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending positions, in the same shape.

        Many positions cost little more than one.
        """
        if not positions.size:
            return np.empty(positions.shape, np.int64)
        taken, length = self.epoch or (self.num_samples, self.num_samples)
        epochs, places = np.divmod(positions, length)
        is_there = places < taken
        if self.given is not None:
            found = np.full(positions.shape, -1, np.int64)
            for epoch in np.unique(epochs).tolist():
                mine = is_there & (epochs == epoch)
                found[mine] = self.given(epoch)[places[mine]]
            return found
        first, last = int(epochs.flat[0]), int(epochs.flat[-1])
        # The shape is (rounds, epochs): each column has the keys of an epoch.
        keys = np.array(
            [
                [_mix(self.seed, epoch, number) for epoch in range(first, last + 1)]
                for number in range(_NUM_ROUNDS)
            ],
            np.uint64,
        )
        columns = (epochs - first).ravel()
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        values, outside = places.ravel().astype(np.uint64), np.flatnonzero(is_there)
        while outside.size:
            of_each = keys if first == last else keys[:, columns[outside]]
            walked = _feistel(values[outside], half_bits, of_each)
            values[outside] = walked
            outside = outside[walked >= self.num_samples]
        found = values.reshape(positions.shape).astype(np.int64)
        return found if self.epoch is None else np.where(is_there, found, -1)


def _feistel(
    values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return values, ``(n,)``, permuted by keys, ``(rounds, n)`` or ``(rounds, 1)``."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << shift) | right


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finalizer of each value (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix(seed: int, epoch: int, number: int) -> int:
    """Return 64 bits that depend on all three arguments."""
    # This is the same finalizer. For one value Python's integers are faster than arrays.
    state = seed
    for part in (epoch, number):
        state = (state * 0x9E3779B97F4A7C15 + part + 1) & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
