"""Ask rank 0 for the costs of saves, report them, and send it the intervals to use."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from orchestrator.core import ACTIVE, RunState
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import (
    CadenceRules,
    Tier,
    cost_share,
    over_budget,
    taken_steps,
)
from orchestrator.shell.capacity import Workers
from orchestrator.shell.inbox import Inbox
from workers.protocol import Pace, SaveCosts
from workers.settings import CheckpointSettings, SnapshotSettings

log = logging.getLogger(__name__)

#: Period of calls to rank 0; a call costs about 2 ms of processor time.
LOOK_S = 5.0


class CadenceWatch:
    """Measures the costs of saves and compares them with the budget."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        workers: Workers,
        rules: CadenceRules,
        snapshot: SnapshotSettings,
        checkpoint: CheckpointSettings,
    ) -> None:
        self._workers = workers
        self._inbox = inbox
        self._rules = rules
        self._kept = Pace(
            snapshot_steps=snapshot.first_every, checkpoint_steps=checkpoint.first_every
        )
        self._costs: SaveCosts | None = None
        self._problem = ""

    def document(self, state: RunState) -> dict[str, Any]:
        """Return the status document's section on saves: costs, intervals and the budget."""
        costs = self._costs
        unmeasured = "not measured yet" if self._rules.chooses else "as configured"
        return {
            "snapshot_steps": self._steps[0],
            "snapshot_taken_steps": costs and self._taken_steps(costs),
            "checkpoint_steps": self._kept.checkpoint_steps,
            "step_s": costs and costs.step_s,
            "snapshot_stall_s": costs and costs.snapshot_stall_s,
            "checkpoint_stall_s": costs and costs.checkpoint_stall_s,
            "cost_share": costs and self._share(costs),
            "cost_share_max": self._rules.cost_share_max,
            "problems": [each for each in (self._problem, costs.trouble if costs else "") if each],
            "reason": state.pace_reason or unmeasured,
        }

    @property
    def _steps(self) -> tuple[int, int]:
        snapshot_steps = self._kept.snapshot_steps if self._rules.has_snapshots else 0
        return snapshot_steps, self._kept.checkpoint_steps

    def _share(self, costs: SaveCosts) -> float:
        stalls_s = costs.snapshot_stall_s, costs.checkpoint_stall_s
        # Skipped snapshots stall no step.
        steps = self._taken_steps(costs), self._kept.checkpoint_steps
        return cost_share(costs.step_s, *stalls_s, steps=steps)

    def _taken_steps(self, costs: SaveCosts) -> int:
        snapshot = Tier(stall_s=costs.snapshot_stall_s, busy_s=costs.snapshot_busy_s)
        return taken_steps(costs.step_s, snapshot, every=self._steps[0])

    async def ask_forever(self, state: Callable[[], RunState]) -> None:
        """Exchange costs and intervals with rank 0 of the attempt that trains."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = state()
            members, workers = now.attempt.members, now.fleet.workers
            if now.phase in ACTIVE and members and members[0] in workers:
                await self._ask(workers[members[0]].name, now.attempt.number, now.pace)

    async def tell(self, action: act.SetCadence) -> None:
        """Send rank 0 the new intervals; ``ask_forever`` repeats them."""
        log.info("cadence_changed", extra={"pace": repr(action.pace), "reason": action.reason})
        await self._workers.keep_pace(action.worker, action.attempt, action.pace)

    async def _ask(self, worker: str, attempt: int, pace: Pace) -> None:
        costs = await self._workers.keep_pace(worker, attempt, pace)
        if costs is not None and (costs.step_s or costs.trouble):
            self.show(costs)
            at_s = self._inbox.at_s()
            self._inbox.post(ev.SavesMeasured(at_s=at_s, attempt=attempt, costs=costs))

    def show(self, costs: SaveCosts) -> None:
        """Keep the measured costs, and warn when they exceed the budget."""
        self._costs, self._kept = costs, costs.pace
        share = self._share(costs)
        problem = over_budget(share, self._rules, steps=self._steps)
        if problem and not self._problem:
            log.warning("%s", problem)
        self._problem = problem
