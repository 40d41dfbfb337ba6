"""What steps and saves cost on one rank, measured as it goes: for the choice of intervals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from workers.protocol import Pace, SaveCosts

__all__ = ["SaveMeter"]

#: Medians are of so many, so that a step that was descheduled counts for nothing.
_NUM_KEPT: Final = 32


class _Tier:
    """Saves of one tier: what they took from training, and how long they were under way."""

    def __init__(self) -> None:
        self.stalls_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self.busy_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self.begun_s: float | None = None

    def begin(self, at_s: float, stall_s: float) -> None:
        self.stalls_s.append(stall_s)
        self.begun_s = at_s

    def look(self, at_s: float, *, is_busy: bool) -> None:
        if self.begun_s is not None and not is_busy:
            self.busy_s.append(at_s - self.begun_s)
            self.begun_s = None


class SaveMeter:
    """Takes in what happens between steps; ``costs`` says what it comes to."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._snapshot, self._checkpoint = _Tier(), _Tier()
        self._boundary_s = 0.0

    def step(self, step_s: float, boundary_s: float) -> None:
        """Take in a step, which began with the saves before it, and what those behind it took."""
        self._steps_s.append(max(step_s - self._boundary_s, 0.0))
        self._boundary_s = boundary_s

    def snapshot(self, at_s: float, stall_s: float, *, is_pinned: bool) -> None:
        """Take in a snapshot that begins at ``at_s``; with ``is_pinned`` it is stored, too."""
        self._snapshot.begin(at_s, stall_s)
        if is_pinned:
            # Others store it: nobody waits for that.
            self._checkpoint.begin(at_s, 0.0)

    def checkpoint(self, at_s: float, stall_s: float) -> None:
        """Take in a checkpoint that this rank writes itself."""
        self._checkpoint.begin(at_s, stall_s)

    def look(self, at_s: float, *, is_snapshot_busy: bool, is_checkpoint_busy: bool) -> None:
        """Take in, between two steps, what is under way still."""
        self._snapshot.look(at_s, is_busy=is_snapshot_busy)
        self._checkpoint.look(at_s, is_busy=is_checkpoint_busy)

    def costs(self, intervals: tuple[int, int]) -> SaveCosts:
        """Return what it was of late, under these steps between snapshots and checkpoints."""
        return SaveCosts(
            step_s=_middle(self._steps_s),
            snapshot_stall_s=_middle(self._snapshot.stalls_s),
            snapshot_busy_s=_middle(self._snapshot.busy_s),
            checkpoint_stall_s=_middle(self._checkpoint.stalls_s),
            checkpoint_busy_s=_middle(self._checkpoint.busy_s),
            pace=Pace(snapshot_steps=intervals[0], checkpoint_steps=intervals[1]),
        )


def _middle(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
