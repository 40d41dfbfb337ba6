"""Decide what to do with the state after a step: pure, and the same on every rank.

All ranks decide from the same input: the step, the settings, and the signals of all ranks.
"""

from dataclasses import dataclass
from typing import Final

from workers.train.executor import Signals

NO_STEP: Final = -1
#: How many snapshots in a row may be skipped because a rank is behind: at first, and at most. Each
#: snapshot taken despite a slow peer doubles the number, so that the peer can finish a copy before
#: the next one.
_SKIPPED_FIRST: Final = 8
SKIPPED_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The decision about the state after one step."""

    snapshot: bool = False  #: Copy it into memory.
    barrier: bool = False  #: First wait until every rank completed the previous snapshot.
    pin: bool = False  #: Have the keeper store that snapshot.
    storage: bool = False  #: The ranks write it to storage themselves.
    skipped: bool = False  #: A snapshot was due, but a rank was behind.
    #: The newest snapshot that every rank and all peers have; it is not overwritten before there
    #: is a newer one. ``NO_STEP`` without one.
    kept_step: int = NO_STEP


class Cadence:
    """Decide what is due after each step of one attempt."""

    def __init__(self, *, snapshot_every: int, storage_every: int, last_step: int) -> None:
        self._snapshot_every = snapshot_every
        self._storage_every = storage_every
        self._last_step = last_step
        self._storage_due = False
        self._is_first = True
        self._taken_step = self._kept_step = NO_STEP
        self._num_skipped, self._patience = 0, _SKIPPED_FIRST

    def waits(self, step: int, agreed: Signals) -> bool:
        """Return whether all ranks wait for memory and copies after ``step``.

        They do so once: after the first step with a snapshot due, unless the state is stored
        anyway.
        """
        waits = self._is_first and not agreed.leaves and step != self._last_step
        waits = waits and step % self._snapshot_every == 0
        self._is_first &= not waits
        return waits

    @property
    def intervals(self) -> tuple[int, int]:
        """Return the steps between two snapshots, and between two versions in storage."""
        return self._snapshot_every, self._storage_every

    def due(self, step: int, agreed: Signals, *, is_best: bool = False) -> Due:
        """Return what to do after ``step``. Call it once for every step, in order.

        New intervals apply from this step on. A state that is due for storage stays due until it
        can be stored. A snapshot is taken although a rank is behind if the state must not be lost,
        or if too many were skipped; the newest snapshot that all peers have is then kept. The ranks
        write the state to storage themselves if their memory may be lost with them, or if they wait
        for it because it is among the best.
        """
        is_durable = step == self._last_step or (agreed.leaves and agreed.leaves_durably)
        is_durable |= is_best
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
        if not takes:
            self._num_skipped += 1
            return
        if self._num_skipped >= self._patience and is_behind:
            self._patience = min(2 * self._patience, SKIPPED_MAX)
        elif not self._num_skipped:
            self._patience = max(self._patience // 2, _SKIPPED_FIRST)
        self._num_skipped, self._taken_step = 0, step
