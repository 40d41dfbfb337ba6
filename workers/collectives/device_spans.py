"""Measure how long a device takes for a rank's own work, by events in its stream.

The host enqueues a whole step before the device starts it, so the host's times say nothing about
the device. Between two events a device has done the work enqueued between them. If that includes no
work of other ranks, it is the rank's own time, whether its host or its device is slow. A span in
which the rank calls or waits for collectives has no such time, because NCCL's kernels in the stream
include the rank's waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from workers.collectives import nccl
from workers.telemetry import RecordRing

_TIMED: Final = frozenset({"forward", "backward"})


class Mark(Protocol):
    """A position in the stream of the thread that created it."""

    def is_reached(self) -> bool:
        """Return whether the device has reached the position."""

    def since(self, other: Mark) -> float:
        """Return the seconds between two positions that the device has reached."""


class DeviceSpans:
    """Records the spans of a rank that computes on a device. Only the training thread calls it.

    Attributes:
        num_calls: Number of calls of collectives and of waits for them. Any thread may change it.
    """

    def __init__(self, ring: RecordRing, mark: Callable[[], Mark] = nccl.Timed) -> None:
        self._ring, self._mark = ring, mark
        self.num_calls = 0
        #: Record, start, and ``num_calls`` of the open span, followed by the finished spans.
        self._open: tuple[int, Mark, int] | None = None
        self._over: list[tuple[int, Mark, Mark]] = []

    def span(self, op: str, *, step: int, micro_batch: int, tokens: int = 0) -> None:
        """Record that the last span ends, and that ``op`` begins unless it is ""."""
        if self._open is not None:
            number, begin, num_calls = self._open
            self._open = None
            if num_calls == self.num_calls:
                self._over.append((number, begin, self._mark()))
        if op == "optimizer":
            # The host has just read the sums of all ranks, so the device has done all earlier work.
            for number, begin, end in self._over:
                if end.is_reached():
                    self._ring.measured(number, end.since(begin))
            self._over.clear()
        number = self._ring.span(op, step=step, micro_batch=micro_batch, tokens=tokens)
        if op in _TIMED:
            self._open = number, self._mark(), self.num_calls
