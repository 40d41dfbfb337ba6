"""From a device into a slot: in buckets, beside the computation, and done before the next update.

After an update the state stands still until the next one. Meanwhile it leaves in buckets over a
queue of its own, and each is checksummed while the next ones are on their way. Few are under way
at once, and those only for as long as the rank holds one of the node's credits: whatever else
wants the bus waits for a bucket and not for a state. What is left when the update comes leaves at
once, and the device puts the update off until it is through; the training thread waits for nothing.

Buckets follow each other as fast as that. Forward and backward passes do not release them: the
processor has asked for all of a pass long before the device gets there, and the sooner a snapshot
is whole the less is lost. Nor are updates released one by one: optimizers make them in one call.

What lies in the memory of this machine was copied already, and is only checksummed here.

Source: the device level of REFT's hierarchical snapshots (arXiv 2310.12670).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ucp_core.checksums import crc32
from workers.snapshot.credits import PATIENCE_S, Credits
from workers.snapshot.cuda import CudaLane, Lane, Mark

__all__ = ["BUCKET_BYTES", "IN_FLIGHT_MAX", "DeviceCopy", "Piece", "cut"]

#: Two thirds of a millisecond of a bus of 50 GB/s.
BUCKET_BYTES: Final = 32 << 20
#: One is copied while the other waits for it.
IN_FLIGHT_MAX: Final = 2
#: So many buckets leave on one credit, some 10 ms; then it is another rank's turn.
_TURN: Final = 16


class Piece(NamedTuple):
    """Bytes of one of several tensors."""

    tensor: int
    low: int
    high: int


def cut(
    sizes_bytes: Sequence[int], *, bucket_bytes: int, block_bytes: int
) -> list[tuple[Piece, ...]]:
    """Cut tensors into buckets, in order; a tensor only where a block of it begins.

    Args:
        sizes_bytes: Of each tensor.
        bucket_bytes: The most of a bucket; a multiple of ``block_bytes``.
        block_bytes: Of the checksums.
    """
    buckets: list[tuple[Piece, ...]] = []
    bucket: list[Piece] = []
    room = bucket_bytes
    for index, size in enumerate(sizes_bytes):
        low = 0
        while low < size:
            fits = size - low if size - low <= room else room // block_bytes * block_bytes
            if fits:
                bucket.append(Piece(index, low, low + fits))
                low += fits
                room -= fits
            if low < size:
                buckets.append(tuple(bucket))
                bucket, room = [], bucket_bytes
    return [one for one in (*buckets, tuple(bucket)) if one]


class DeviceCopy:
    """Copies of a state off its device, one at a time.

    The training thread calls ``begin`` and ``hold_update``, another one ``run``.

    Args:
        node: Its credits.
        block_bytes: Of the checksums.
        lane: How to copy; None for a CUDA stream where something is on such a device, and
            otherwise at once.
    """

    def __init__(self, node: Credits, block_bytes: int, lane: Lane | None = None) -> None:
        self._node = node
        self._block_bytes = block_bytes
        self._lane = lane
        self._lock = threading.Lock()
        self._flat: list[tuple[Tensor, Tensor]] = []
        self._todo: deque[tuple[Piece, ...]] = deque()
        self._under_way: deque[tuple[tuple[Piece, ...], Mark]] = deque()
        self._begun: Mark | None = None
        self._last: Mark | None = None
        self._num_checked = 0

    def begin(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], *, num_checked: int
    ) -> None:
        """Note what is to be copied, as it is once the device has done what it was asked so far.

        Args:
            targets: Contiguous, in memory of this machine.
            sources: Of the same shapes.
            num_checked: So many of the first of them ``run`` is to checksum.
        """
        with self._lock:
            self._todo.clear()
            self._under_way.clear()
            self._begun = self._last = None
            self._num_checked = 0
            if not sources:
                return
            lane = self._lane_of(sources)
            if lane is None:
                with torch.no_grad():
                    torch._foreach_copy_(list(targets), list(sources))
                return
            self._flat = [_flat(*pair) for pair in zip(targets, sources, strict=True)]
            sizes = [target.numel() * target.element_size() for target, _ in self._flat]
            self._todo.extend(self._cut(sizes))
            self._begun = lane.mark()
            self._num_checked = num_checked

    def hold_update(self) -> None:
        """Have what the training thread asks of the device from now on run after the copy."""
        with self._lock:
            self._queue(len(self._todo))
            if self._last is not None and self._lane is not None:
                self._lane.hold(self._last)

    def run(self, data: Sequence[memoryview]) -> list[list[int]]:
        """Copy what ``begin`` noted; return, when all is there, the crc32 of every block.

        Args:
            data: The memory of the targets that are checksummed; or other memory, if none are.
        """
        found: list[list[int]] = [[] for _ in data]
        if self._begun is not None:
            self._in_turns(lambda: self._next(data, found))
        if not self._num_checked:
            buckets = iter(self._cut(map(len, data)))
            self._in_turns(lambda: self._check(next(buckets, ()), data, found))
        return found

    def _in_turns(self, go_on: Callable[[], bool]) -> None:
        """Call it for as long as it says so, on a credit of the node each turn."""
        goes_on, patience_s = True, PATIENCE_S
        while goes_on:
            with self._node.one(patience_s) as has_one:
                goes_on = all(go_on() for _ in range(_TURN))
            if not has_one:
                # Whoever keeps it may be stopped: one wait is enough.
                patience_s = 0.0

    def _next(self, data: Sequence[memoryview], found: list[list[int]]) -> bool:
        """Wait for the next bucket while others follow; return whether there was one."""
        with self._lock:
            self._queue(IN_FLIGHT_MAX - len(self._under_way))
            if not self._under_way:
                return False
            bucket, mark = self._under_way[0]
        mark.wait()
        with self._lock:
            self._under_way.popleft()
        self._check([piece for piece in bucket if piece.tensor < self._num_checked], data, found)
        return True

    def _check(
        self, pieces: Sequence[Piece], data: Sequence[memoryview], found: list[list[int]]
    ) -> bool:
        """Checksum pieces; return whether there were any."""
        for tensor, low, high in pieces:
            starts = range(low, high, self._block_bytes)
            edges = itertools.pairwise((*starts, high))
            found[tensor] += [crc32(data[tensor][start:stop]) for start, stop in edges]
        return bool(pieces)

    def wait(self) -> None:
        """Return when the copy is there; any thread may."""
        with self._lock:
            self._queue(len(self._todo))
            last = self._last
        if last is not None:
            last.wait()

    def end(self) -> None:
        """Copy no more; return when nothing is under way. For after the last ``run``."""
        with self._lock:
            self._todo.clear()
            last = self._last
        if last is not None:
            last.wait()

    def _queue(self, num: int) -> None:
        """Ask for so many more buckets."""
        for _ in range(min(num, len(self._todo))):
            assert self._lane is not None
            assert self._begun is not None
            bucket = self._todo.popleft()
            pairs = [_part(self._flat[index], low, high) for index, low, high in bucket]
            self._last = self._lane.copy([pair for pair in pairs if pair], self._begun)
            self._under_way.append((bucket, self._last))

    def _cut(self, sizes_bytes: Iterable[int]) -> list[tuple[Piece, ...]]:
        return cut(list(sizes_bytes), bucket_bytes=BUCKET_BYTES, block_bytes=self._block_bytes)

    def _lane_of(self, sources: Sequence[Tensor]) -> Lane | None:
        if self._lane is None:
            device = next((source.device for source in sources if source.is_cuda), None)
            if device is not None:
                self._lane = CudaLane(device)
        return self._lane


def _flat(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as bytes; as they are if the bytes of the source do not lie side by side."""
    source = source.detach()
    if not source.is_contiguous():
        return target, source
    return target.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)


def _part(pair: tuple[Tensor, Tensor], low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """Return some bytes of a pair; all of one that cannot be cut, with its first."""
    target, source = pair
    if not source.is_contiguous():
        return None if low else pair
    return target[low:high], source[low:high]
