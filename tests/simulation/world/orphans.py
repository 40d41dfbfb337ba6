"""A run whose head is lost: its trainers and keepers commit and delete on their own.

Each looks who owns the directory before it commits, and once more when it knows what to delete. The
request that follows may still be under way when the directory is claimed again.
"""

from random import Random

from tests.simulation.world.parts import STEP_S, SimAttempt
from tests.simulation.world.wires import World

#: A request of a process that was asked to wait, or whose store was slow.
_UNDER_WAY_S = 0.2


class Orphans:
    """The processes of one attempt, which now reach only storage."""

    def __init__(self, world: World, attempt: SimAttempt, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._claim = world.storage.claim
        self._attempt, self._lineage = attempt.number, attempt.lineage
        self._every, self._keep = attempt.store_every, rng.randint(1, 3)
        self._step = attempt.step

    def train_on(self) -> None:
        """Take the steps up to the next commit."""
        if self._step < self._world.rules.total_steps:
            self._world.at(self._every * STEP_S, self._save)

    def _save(self) -> None:
        before, total_steps = self._step, self._world.rules.total_steps
        self._step = min(before + self._every, total_steps)
        # A bug of the training code ends them.
        is_sound = not self._world.raises_at.keys() & range(before + 1, self._step + 1)
        if is_sound and self._world.storage.owns(self._claim):
            self._world.at(_UNDER_WAY_S * self._rng.random(), self._commit, self._step)
            self.train_on()

    def _commit(self, step: int) -> None:
        world = self._world
        world.storage.commit(step, self._attempt, world.now_s)
        doomed = world.storage.older(self._lineage, keep=self._keep)
        if world.storage.owns(self._claim):
            owner = world.storage.claim
            world.at(_UNDER_WAY_S * self._rng.random(), self._delete, doomed, owner)

    def _delete(self, doomed: list[tuple[int, int]], owner: int) -> None:
        for version in doomed:
            self._world.monitor.deleted(version, claim=self._claim, owner=owner)
            self._world.storage.commits.pop(version, None)
