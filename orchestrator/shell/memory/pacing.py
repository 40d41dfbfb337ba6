"""How often the run saves: asks rank 0 what saves cost, and tells it what follows from that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from orchestrator.core import ACTIVE, RunState, RunStats
from orchestrator.policies import (
    Cadence,
    CadenceFacts,
    CadenceRules,
    Redundancy,
    Tier,
    cost_share,
    decide,
    over_budget,
    settled,
    taken_steps,
)
from orchestrator.shell.capacity import Crew
from orchestrator.shell.serve import RunMetrics
from workers.protocol import Pace, SaveCosts
from workers.settings import AUTO, CheckpointSettings, SnapshotSettings

__all__ = ["Pacing"]

log = logging.getLogger(__name__)

#: How often rank 0 is asked and told; a call costs about 2 ms of processor time.
LOOK_S = 5.0
#: After a node is lost the run stepped again within 1 to 5 s, and the first step is copied at once.
REPROTECT_S = 10.0
_NODE_FAULTS = frozenset({"node_loss", "preemption"})
_PROCESS_FAULTS = frozenset({"crash", "hang", "exception"})


class Pacing:
    """The run's intervals.

    Args:
        crew: Reaches the workers.
        stats: The run's failures.
        metrics: Where to show what saves cost.
        snapshot: What was asked for of snapshots.
        checkpoint: What was asked for of checkpoints.
    """

    def __init__(
        self,
        *,
        crew: Crew,
        stats: RunStats,
        metrics: RunMetrics,
        snapshot: SnapshotSettings,
        checkpoint: CheckpointSettings,
    ) -> None:
        self._crew = crew
        self._stats = stats
        self._metrics = metrics
        self._has_snapshots = bool(snapshot.every_steps)
        self._chooses_snapshots = snapshot.every_steps == AUTO
        self._chooses_checkpoints = checkpoint.every_steps == AUTO
        self._kept = Pace(
            snapshot_steps=snapshot.first_every, checkpoint_steps=checkpoint.first_every
        )
        self._told = Pace()
        self._rules = CadenceRules()
        self._costs: SaveCosts | None = None
        self._report_problem = ""
        self._reason = "not measured yet" if self._chooses else "as configured"

    @property
    def _chooses(self) -> bool:
        return self._chooses_snapshots or self._chooses_checkpoints

    def document(self) -> dict[str, Any]:
        """Return what the status document says of it: measured, and beside the budget."""
        costs = self._costs
        return {
            "snapshot_steps": self._steps[0],
            "snapshot_taken_steps": self._taken_steps(costs) if costs is not None else None,
            "checkpoint_steps": self._kept.checkpoint_steps,
            "step_s": costs.step_s if costs is not None else None,
            "snapshot_stall_s": costs.snapshot_stall_s if costs is not None else None,
            "checkpoint_stall_s": costs.checkpoint_stall_s if costs is not None else None,
            "cost_share": self._share(costs) if costs is not None else None,
            "cost_share_max": self._rules.cost_share_max,
            "problems": [self._report_problem] if self._report_problem else [],
            "reason": self._reason,
        }

    @property
    def _steps(self) -> tuple[int, int]:
        snapshot_steps = self._kept.snapshot_steps if self._has_snapshots else 0
        return snapshot_steps, self._kept.checkpoint_steps

    def _share(self, costs: SaveCosts) -> float:
        stalls_s = costs.snapshot_stall_s, costs.checkpoint_stall_s
        # Those that are skipped stall nobody.
        steps = self._taken_steps(costs), self._kept.checkpoint_steps
        return cost_share(costs.step_s, *stalls_s, steps=steps)

    def _taken_steps(self, costs: SaveCosts) -> int:
        return taken_steps(costs.step_s, _in_memory(costs), every=self._steps[0])

    async def keep_forever(self, state: Callable[[], RunState]) -> None:
        """Ask and tell rank 0 of whatever attempt trains."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = state()
            if (
                now.phase not in ACTIVE
                or not now.attempt.members
                or now.attempt.members[0] not in now.fleet.workers
            ):
                continue
            worker, attempt = now.fleet.workers[now.attempt.members[0]].name, now.attempt.number
            costs = await self._crew.keep_pace(worker, attempt, self._told)
            if costs is not None and costs.step_s:
                self._take(costs, self._redundancy(now))

    def _redundancy(self, state: RunState) -> Redundancy:
        nodes = {
            state.fleet.workers[each].node
            for each in state.attempt.members
            if each in state.fleet.workers
        }
        plan = state.attempt.plan
        return Redundancy(
            num_nodes=max(1, len(nodes)),
            group_nodes=max(map(len, plan.groups), default=1),
            tolerance=plan.tolerance if plan.groups else 0,
            reprotect_s=REPROTECT_S,
        )

    def _take(self, costs: SaveCosts, redundancy: Redundancy) -> None:
        self._costs, self._kept = costs, costs.pace
        share = self._share(costs)
        self._metrics.show_saves(costs, share=share, share_max=self._rules.cost_share_max)
        problem = over_budget(share, self._rules, steps=self._steps)
        if problem and not self._report_problem:
            log.warning("saving_over_budget", extra={"reason": problem})
        self._report_problem = problem
        # What is not measured is not free.
        is_known = costs.checkpoint_busy_s > 0 or not self._chooses_checkpoints
        is_known &= costs.snapshot_stall_s > 0 or not self._has_snapshots
        if self._chooses and is_known:
            self._choose(decide(self._facts(costs, redundancy), self._rules))

    def _facts(self, costs: SaveCosts, redundancy: Redundancy) -> CadenceFacts:
        kinds = [incident.kind for incident in self._stats.incidents]
        from_storage = [
            incident
            for incident in self._stats.incidents
            if incident.kind in _NODE_FAULTS | _PROCESS_FAULTS and "storage" in incident.sources
        ]
        return CadenceFacts(
            step_s=costs.step_s,
            snapshot=_in_memory(costs) if self._has_snapshots else None,
            persist=Tier(stall_s=costs.checkpoint_stall_s, busy_s=costs.checkpoint_busy_s),
            observed_s=self._stats.wall_s,
            num_process_faults=sum(kind in _PROCESS_FAULTS for kind in kinds),
            num_node_faults=sum(kind in _NODE_FAULTS for kind in kinds),
            num_uncovered=len(from_storage),
            redundancy=redundancy,
            snapshot_steps=0 if self._chooses_snapshots else self._steps[0],
            persist_steps=0 if self._chooses_checkpoints else self._steps[1],
        )

    def _choose(self, found: Cadence) -> None:
        kept, before, self._reason = self._kept, self._told, found.reason
        snapshot_steps = checkpoint_steps = 0
        # What was told last is kept from the next step on.
        if self._chooses_snapshots:
            snapshot_steps = before.snapshot_steps or kept.snapshot_steps
            snapshot_steps = settled(snapshot_steps, found.snapshot_steps)
        if self._chooses_checkpoints:
            checkpoint_steps = before.checkpoint_steps or kept.checkpoint_steps
            checkpoint_steps = settled(checkpoint_steps, found.persist_steps)
        told = Pace(snapshot_steps=snapshot_steps, checkpoint_steps=checkpoint_steps)
        if told != before:
            self._told = told
            log.info("pace_changed", extra={"pace": repr(told), "reason": found.reason})


def _in_memory(costs: SaveCosts) -> Tier:
    return Tier(stall_s=costs.snapshot_stall_s, busy_s=costs.snapshot_busy_s)
