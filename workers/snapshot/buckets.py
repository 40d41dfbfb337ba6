"""Divide a state into the buckets in which it is copied off a device."""

import operator
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from workers.memory import Question

#: Size of a bucket, which takes two thirds of a millisecond on a bus of 50 GB/s.
BUCKET_BYTES: Final = 32 << 20
#: Size of a piece of a bucket. Copies of other streams wait until a piece is copied.
PIECE_BYTES: Final = 32 << 20


class TensorRange(NamedTuple):
    """Some bytes of one of several tensors."""

    tensor: int
    low: int
    high: int


def into_buckets(
    sizes_bytes: Sequence[int], *, bucket_bytes: int, block_bytes: int
) -> list[tuple[TensorRange, ...]]:
    """Divide tensors into buckets, in order. A tensor is only divided at blocks.

    ``bucket_bytes`` is a multiple of ``block_bytes``, the unit of the checksums.
    """
    buckets: list[tuple[TensorRange, ...]] = []
    bucket: list[TensorRange] = []
    room = bucket_bytes
    for index, size in enumerate(sizes_bytes):
        low = 0
        while low < size:
            fits = size - low if size - low <= room else room // block_bytes * block_bytes
            if fits:
                bucket.append(TensorRange(index, low, low + fits))
                low += fits
                room -= fits
            if low < size:
                buckets.append(tuple(bucket))
                bucket, room = [], bucket_bytes
    return [one for one in (*buckets, tuple(bucket)) if one]


class Asked(NamedTuple):
    """The part of a bucket to checksum: ranges of tensors, and their memory."""

    ranges: Sequence[TensorRange]
    question: Question


class Plan:
    """The parts of each bucket of a state, kept because slicing takes longer than enqueueing.

    ``places`` are the addresses of the tensors' memory, because a tensor may move.

    Attributes:
        asked: The part of each bucket to checksum, by number, once it was requested.
    """

    def __init__(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        places: Sequence[int],
        buckets: list[tuple[TensorRange, ...]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._targets, self._sources, self._places = targets, sources, places
        self.buckets, self.bucket_bytes = buckets, bucket_bytes
        self.num_bytes = sum(part.high - part.low for each in buckets for part in each)
        self._pieces: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}
        self.asked: dict[int, Asked] = {}
        flat = [_flat(*pair) for pair in zip(targets, sources, strict=True)]
        parts = [[_part(flat[tensor], low, high) for tensor, low, high in each] for each in buckets]
        self.parts = [[part for part in bucket if part is not None] for bucket in parts]

    def pieces(self, number: int, block_bytes: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the parts of a bucket in pieces. They are computed once."""
        if number not in self._pieces:
            parts = self.parts[number]
            ranges = into_buckets(
                [target.nbytes for target, _ in parts],
                bucket_bytes=PIECE_BYTES,
                block_bytes=block_bytes,
            )
            found = [[_part(parts[part], low, high) for part, low, high in each] for each in ranges]
            pieces = [[part for part in piece if part is not None] for piece in found]
            self._pieces[number] = [piece for piece in pieces if piece] or [parts]
        return self._pieces[number]

    def fits(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], places: Sequence[int]
    ) -> bool:
        """Return whether this plan copies these tensors to these targets."""
        return _are_same(targets, self._targets) and self.copies(sources, places)

    def copies(self, sources: Sequence[Tensor], places: Sequence[int]) -> bool:
        """Return whether this plan copies these tensors."""
        return places == self._places and _are_same(sources, self._sources)


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _flat(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as bytes; unchanged if the source is not contiguous."""
    source = source.detach()
    if not source.is_contiguous():
        return target, source
    return target.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)


def _part(pair: tuple[Tensor, Tensor], low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """Return some bytes of a pair; for an indivisible pair, all bytes with the first ones."""
    target, source = pair
    if not source.is_contiguous():
        return None if low else pair
    return target[low:high], source[low:high]
