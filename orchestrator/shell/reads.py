"""Find where a run's version is, which workers live, and how much memory keepers have.

Members enter an attempt with the answers.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from orchestrator import core
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import bad_sources
from orchestrator.shell.parts import Parts
from workers.protocol import Assignment

#: Keepers that come back within this time are asked together and get their orders together.
MEASURE_S = 0.05
#: How long a survey of workers waits for an answer; a live one took 1 to 50 ms. Continuing without
#: a late answer costs nothing.
SURVEY_S = 0.5


class Reads:
    """Asks keepers, workers and storage, and posts their answers."""

    def __init__(self, parts: Parts, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self._parts = parts
        self._spawn = spawn
        self._measuring: asyncio.TimerHandle | None = None
        self._measured: tuple[tuple[tuple[str, int], ...], int] = ((), 0)

    async def find_and_enter(self, action: act.StartAttempt) -> None:
        """Start the members once the parts of their version and their rendezvous are known."""
        parts, snapshots = self._parts, self._parts.snapshots
        version, unreached = (action.resume_step, action.resume_attempt), action.unreached
        memory = snapshots.known_parts(*version, unreached=unreached)
        if not memory and action.resume_step and parts.config.snapshot.every_steps:
            memory = await snapshots.find_parts(*version, bad=action.bad, unreached=unreached)
        host, port = await parts.rendezvous.open()
        if parts.state.attempt.number != action.attempt or parts.state.phase not in core.ACTIVE:
            return  # a member that was fenced meanwhile has reported it and would refuse to enter
        plan = action.plan
        for rank, (worker, _, reservation) in enumerate(action.members):
            assignment = Assignment(
                attempt=action.attempt,
                rank=rank,
                layout=action.layout,
                store_host=host,
                store_port=port,
                resume_step=action.resume_step,
                resume_attempt=action.resume_attempt,
                lineage=action.lineage,
                memory=memory,
                guards=plan.guards[rank] if plan.guards is not None else None,
                parity=plan.rank_groups[rank] if plan.rank_groups is not None else (),
                claim=parts.owner.claim,
            )
            parts.workers.enter(worker, assignment, parts.capacity.gpu_ids(reservation))

    async def read_committed(self, action: act.ReadCommitted) -> None:
        """Post the newest version; post nothing if it cannot be known now: the core asks again."""
        parts, state = self._parts, self._parts.state
        # Once all have left, no commit is newer than the least step at which one left. Before that,
        # no commit is newer than the last step that all reported.
        newest_step = state.attempt.step if state.attempt.num_inside else state.attempt.left_step
        answer = await parts.snapshots.read(
            action.lineage,
            enough_step=newest_step,
            stored_step=_stored_step(state),
            has_stored=state.stored > 0,
            bad=action.bad,
            unreached=action.unreached,
        )
        if answer is None:
            return
        self._measure()
        returning = await parts.nodes.outlived(filter(self._may_bring_back, answer.unheard))
        found = answer.version
        parts.inbox.post(
            ev.CommittedRead(
                at_s=parts.inbox.at_s(),
                attempt=action.attempt,
                step=found.step if found else 0,
                committed_by=found.attempt if found else 0,
                skipped=answer.skipped,
                number=action.number,
                source=found.source if found else "",
                lost=answer.lost,
                returning=tuple(sorted(returning)),
                stored=answer.stored_step,
                damaged=answer.damaged,
            )
        )

    def _may_bring_back(self, node: str) -> bool:
        """Return whether a keeper that died alone will have memory again once it is back."""
        fleet, snapshot = self._parts.state.fleet, self._parts.config.snapshot
        lives = any(fleet.nodes[worker.node].name == node for worker in fleet.workers.values())
        return bool(snapshot.every_steps) and lives

    def on_keeper(self, node: str) -> None:
        """Note that a keeper is up, for the first time or again."""
        self._parts.snapshots.on_keeper(node)
        self.measure_soon()

    def measure_soon(self) -> None:
        """Ask keepers for their memory, and repeat their orders, after ``MEASURE_S``."""
        if self._measuring is None:
            self._measuring = asyncio.get_running_loop().call_later(
                MEASURE_S, lambda: self._spawn(self._measure_all())
            )

    async def _measure_all(self) -> None:
        self._measuring = None
        # A restarted controller does not know what keepers hold.
        await self._parts.snapshots.inventories()
        self._measure()
        if self._parts.state.phase in core.ACTIVE:
            self._parts.orders.repeat()

    def _measure(self) -> None:
        """Report the memory of keepers if it has changed."""
        found = self._parts.snapshots.measured()
        if found != self._measured:
            self._measured = found
            (budgets, state_bytes), inbox = found, self._parts.inbox
            inbox.post(
                ev.MemoryMeasured(at_s=inbox.at_s(), budgets=budgets, state_bytes=state_bytes)
            )

    async def survey(self) -> None:
        """After a restart of the controller, find the workers that live."""
        parts, state = self._parts, self._parts.state
        known = [
            # A starting worker cannot answer and is in no attempt.
            (
                worker.name,
                state.fleet.nodes[worker.node].name,
                0.0 if worker.status is core.WorkerStatus.STARTING else SURVEY_S,
            )
            for worker in state.fleet.workers.values()
        ]
        alive = await parts.workers.survey(known)
        attempt = parts.state.attempt
        found = core.adopted(parts.state, alive)
        parts.observer.begin(attempt.number, found.members, attempt.step)
        for worker in found.inside:
            parts.workers.attend(worker, attempt.number, is_first=worker == found.members[0])
        parts.inbox.post(
            ev.WorkersSurveyed(
                at_s=parts.inbox.at_s(),
                alive=tuple(alive),
                reservations=tuple(parts.capacity.granted()),
                pending_reservations=tuple(parts.capacity.pending()),
            )
        )


def _stored_step(state: core.RunState) -> int:
    """Return the newest step that is known to be in storage and not known to be bad."""
    step = 0 if state.committed_in_memory else state.committed[0]
    return 0 if step in bad_sources.in_storage(state.bad, state.lineage) else step
