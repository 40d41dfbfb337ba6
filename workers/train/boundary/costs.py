"""Costs of steps and saves on one rank, measured during training to choose intervals. Pure."""

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from workers.protocol import Pace, SaveCosts

#: Medians are over this many, so that one descheduled step has no effect.
_NUM_KEPT: Final = 32


class _Tier:
    """Saves of one tier: how long training waited for them, and how long they took."""

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
    """Collect measurements between steps; ``costs`` returns the medians."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._snapshot, self._checkpoint = _Tier(), _Tier()
        self._boundary_s = 0.0

    def step(self, step_s: float, boundary_s: float) -> None:
        """Add a step; ``step_s`` includes the saves before it, not the ``boundary_s`` after it."""
        self._steps_s.append(max(step_s - self._boundary_s, 0.0))
        self._boundary_s = boundary_s

    def snapshot(self, at_s: float, stall_s: float, *, is_pinned: bool) -> None:
        """Add a snapshot that starts at ``at_s``; with ``is_pinned`` the keeper stores it, too."""
        self._snapshot.begin(at_s, stall_s)
        if is_pinned:
            # Training does not wait for the keeper.
            self._checkpoint.begin(at_s, 0.0)

    def checkpoint(self, at_s: float, stall_s: float) -> None:
        """Add a checkpoint that this rank writes itself."""
        self._checkpoint.begin(at_s, stall_s)

    def look(self, at_s: float, *, is_snapshot_busy: bool, is_checkpoint_busy: bool) -> None:
        """Note, between two steps, which saves are not complete."""
        self._snapshot.look(at_s, is_busy=is_snapshot_busy)
        self._checkpoint.look(at_s, is_busy=is_checkpoint_busy)

    def costs(self, intervals: tuple[int, int]) -> SaveCosts:
        """Return recent costs; ``intervals`` are the steps between snapshots and checkpoints."""
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
