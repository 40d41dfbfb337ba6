"""What is done with the state after a step: pure, and the same on every rank.

Ranks decide alike because they decide from the same: the step, the settings, and what all of
them said in the step's all-reduce of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.train.executor import Signals

__all__ = ["NO_STEP", "SKIPPED_MAX", "Cadence", "Due"]

NO_STEP: Final = -1
#: So many snapshots in a row are skipped because a rank is behind: at first, and at most. A peer
#: that is slow for a moment is waited for, and one that needs longer is given twice the time after
#: each that was taken in spite of it: else it would never finish a copy before the next.
_SKIPPED_FIRST: Final = 8
SKIPPED_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is done with the state after one step.

    Attributes:
        snapshot: It is copied into memory.
        barrier: Before that every rank completes the snapshot before.
        pin: The keeper is to store that snapshot.
        storage: The ranks themselves write it to storage.
        skipped: It would have been copied, but a rank was behind.
        kept_step: The newest snapshot that every rank and all peers have, to be left alone until
            there is a newer one; ``NO_STEP`` if there is none.
    """

    snapshot: bool = False
    barrier: bool = False
    pin: bool = False
    storage: bool = False
    skipped: bool = False
    kept_step: int = NO_STEP


class Cadence:
    """Decides what is due, step after step of one attempt.

    Args:
        snapshot_every: Steps between two snapshots, at least 1.
        storage_every: Steps between two versions in storage, at least 1.
        last_step: Of the run.
    """

    def __init__(self, *, snapshot_every: int, storage_every: int, last_step: int) -> None:
        self._snapshot_every = snapshot_every
        self._storage_every = storage_every
        self._last_step = last_step
        self._storage_due = False
        self._is_first = True
        self._taken_step = self._kept_step = NO_STEP
        self._num_skipped, self._patience = 0, _SKIPPED_FIRST

    def waits(self, step: int, agreed: Signals) -> bool:
        """Return whether ``step`` is one after which all ranks wait for memory, and for copies.

        The first one that is due for a snapshot; never where the state is stored in any case.
        """
        waits = self._is_first and not agreed.leaves and step != self._last_step
        waits = waits and step % self._snapshot_every == 0
        self._is_first &= not waits
        return waits

    @property
    def intervals(self) -> tuple[int, int]:
        """Return the steps between two snapshots, and between two versions in storage."""
        return self._snapshot_every, self._storage_every

    def due(self, step: int, agreed: Signals) -> Due:
        """Return what to do after ``step``; every step is asked about once, in order.

        Intervals that a rank has said hold for this step already.
        What is due for storage stays due until it can be done. A state that must not be lost is
        taken though somebody is behind, and written to storage by the ranks themselves if their
        memory may go with them. So is one after too many that were skipped: what peers have is
        kept then, and a lost process costs no more than those.
        """
        is_durable = step == self._last_step or (agreed.leaves and agreed.leaves_durably)
        is_forced = is_durable or agreed.leaves
        self._snapshot_every = agreed.snapshot_steps or self._snapshot_every
        self._storage_every = agreed.storage_steps or self._storage_every
        self._storage_due |= step % self._storage_every == 0
        if agreed.no_memory:
            self._taken_step = self._kept_step = NO_STEP
            stores = self._storage_due or is_forced
            self._storage_due = False
            return Due(storage=stores)
        wants_pin = self._storage_due and not agreed.storage_busy and not is_durable
        if not agreed.behind:
            self._kept_step = self._taken_step
        is_wanted = is_forced or wants_pin or step % self._snapshot_every == 0
        is_overdue = self._num_skipped >= self._patience
        takes = is_wanted and (is_forced or is_overdue or not agreed.behind)
        if is_wanted:
            self._note(step, takes=takes, is_behind=agreed.behind)
        if is_durable or (takes and wants_pin):
            self._storage_due = False
        return Due(
            snapshot=takes,
            barrier=takes and agreed.behind,
            pin=takes and wants_pin,
            storage=is_durable,
            skipped=is_wanted and not takes,
            kept_step=self._kept_step if takes else NO_STEP,
        )

    def _note(self, step: int, *, takes: bool, is_behind: bool) -> None:
        """Take note of a snapshot that was due."""
        if not takes:
            self._num_skipped += 1
            return
        if self._num_skipped >= self._patience and is_behind:
            self._patience = min(2 * self._patience, SKIPPED_MAX)
        elif not self._num_skipped:
            self._patience = max(self._patience // 2, _SKIPPED_FIRST)
        self._num_skipped, self._taken_step = 0, step
