"""How well snapshots protect the run, for the status page and for plans."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.core import ACTIVE, RunState, WorkerStatus
from orchestrator.policies import Protection, ReducedTime, alert, bad_sources, noted, versions
from orchestrator.shell.memory.snapshots import Snapshots
from workers.protocol import Inventory

#: Shortest time between two judgements, which look at all inventories together.
LOOK_S = 1.0
#: Shortest time between two questions to all keepers during an attempt.
ASK_EVERY_S = 10.0


class ProtectionWatch:
    """Counts the time in which the run could lose fewer than ``tolerance`` nodes (0, 1 or 2)."""

    def __init__(self, *, snapshots: Snapshots, tolerance: int) -> None:
        self._snapshots = snapshots
        self._tolerance = tolerance
        self._time = ReducedTime()
        self._told: tuple[object, ...] = ()
        self._is_doubtful = False
        self._asked: tuple[int, float] = (0, 0.0)  #: Attempt and time of the last question.
        self._answers: tuple[int, Sequence[Inventory]] = (0, ())  #: The attempt and its answers.

    def asks(self, state: RunState, at_s: float) -> bool:
        """Return whether to ``ask`` now, because reports show too little protection.

        Reports are of different moments. If steps are short, they may have no version in common.
        """
        attempt, asked_s = self._asked
        is_recent = attempt == state.attempt.number and at_s - asked_s < ASK_EVERY_S
        if not self._is_doubtful or is_recent:
            return False
        self._asked = (state.attempt.number, at_s)
        return True

    async def ask(self, state: RunState) -> None:
        """Ask all keepers at once what they hold."""
        self._answers = (state.attempt.number, await self._snapshots.inventories())

    def look(self, state: RunState, at_s: float) -> bool:
        """Judge the newest reports, at most once per ``LOOK_S``.

        Return whether keepers on nodes that the run has left are no longer needed; True only once.
        """
        if self._time.looked_s is not None and at_s - self._time.looked_s < LOOK_S:
            return False
        reported, has_trained = self._snapshots.protection(state.lineage), state.attempt.step > 0
        # Before anything was trained there is nothing to protect.
        self._is_doubtful = reported.node_losses_survived < self._tolerance and has_trained
        survived = self._protection(state, reported).node_losses_survived
        is_reduced = survived < self._tolerance and has_trained
        self._time = noted(self._time, at_s, is_reduced=is_reduced)
        emptied = [n for n in state.fleet.emptied if state.fleet.nodes[n].alive]
        told = (state.attempt.number, *emptied)
        if not emptied or state.phase not in ACTIVE or told == self._told:
            return False
        nodes = {state.fleet.nodes[number].name for number, _ in state.attempt.placed}
        is_needless = self._snapshots.protects(
            state.lineage, attempt=state.attempt.number, nodes=nodes, tolerance=self._tolerance
        )
        if is_needless:
            self._told = told
        return is_needless

    def redundancy(self, state: RunState) -> dict[str, Any]:
        """Return the status document's section on redundancy."""
        plan, snapshots = state.attempt.plan, self._snapshots
        protection = self._protection(state, snapshots.protection(state.lineage))
        survived = protection.node_losses_survived
        # The newest step that is known to be in storage; a newer one may be there.
        read_step = 0 if state.committed_in_memory else state.committed[0]
        stored_step = max(snapshots.stored_step(), read_step)
        kind = "storage" if stored_step else "none"
        if protection.step and protection.step >= stored_step:
            kind = "memory"
        # Use the same reports as the rest of the document: the last judgement may be a second old.
        is_whole = survived >= self._tolerance
        alerts = () if is_whole else alert(self._time, survived=survived, tolerance=self._tolerance)
        return {
            "kind": kind,
            "step": protection.step,
            "stored_step": stored_step,
            "node_losses_survived": survived,
            "mechanism": str(plan.mechanism),
            "reason": plan.reason,
            "keepers": snapshots.memory(),
            "problems": [*alerts, *snapshots.problems(plan), *bad_sources.described(state.bad)],
            "reduced_s": round(self._time.total_s, 1),
            "reduced_for_s": round(self._time.for_s, 1),
        }

    def _protection(self, state: RunState, reported: Protection) -> Protection:
        """Return the protection by the last answers if reports show too little."""
        attempt, answers = self._answers
        if reported.node_losses_survived >= self._tolerance or attempt != state.attempt.number:
            return reported
        answered = versions.protection(answers, state.lineage)
        return max(reported, answered, key=lambda each: (each.node_losses_survived, each.step))


def loss_document(inventories: Sequence[Inventory], state: RunState) -> dict[str, Any]:
    """Return the facts for ``everstep plan``, by the names of ``LossFacts``.

    All ``inventories`` must be of the same moment, because keepers drop versions all the time.
    """
    good = bad_sources.good(inventories, state.bad)
    members = [n for n in state.attempt.members if n in state.fleet.workers]
    others = [n for n in state.fleet.workers if n not in set(members)]
    workers = [state.fleet.workers[number] for number in (*members, *others)]
    return {
        "step": state.attempt.step,
        "lineage": [list(entry) for entry in state.lineage],
        "refused": [asdict(each) for each in state.refused],
        "steps": [(asdict(layout), step_s) for layout, step_s in state.steps],
        "bad": [list(source) for source in state.bad],
        "num_members": state.attempt.num_inside,
        "reservations": {
            node.name: len(node.reservations) for node in state.fleet.nodes.values() if node.alive
        },
        "leaving": [
            node.name for node in state.fleet.nodes.values() if node.alive and node.draining
        ],
        "workers": [
            {"worker": worker.name, "node": state.fleet.nodes[worker.node].name}
            for worker in workers
            if worker.status is WorkerStatus.READY
        ],
        "held": [asdict(version) for version in versions.complete(good, state.lineage)],
    }
