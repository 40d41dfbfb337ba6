"""How the virtual cluster saves a step: snapshots in memory, protected there, and storage.

With snapshots on, trainers write to memory only and keepers store what is due; what must be in
storage at once (the last step, a durable yield) trainers write themselves. Without them trainers
write everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.simulation.world.memory import Part, serves
from orchestrator.simulation.world.parts import STEP_S, SimAttempt, SimWorker
from workers.memory import guard_name
from workers.placement import Preference
from workers.protocol import HeldParity, SaveCosts

if TYPE_CHECKING:
    from orchestrator.simulation.world.cluster import SimCluster

#: A write by a trainer, a copy to another node, and a store by a keeper take up to this long.
_WRITE_S = 0.5 * STEP_S
COPY_S = 0.4 * STEP_S
_STORE_S = 3.0 * STEP_S

#: Chance that a member that leaves is in the middle of an update, and so has the state of no step.
_UPDATING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """How often each tier saves.

    Attributes:
        snapshot_every: Steps between two snapshots; 0 takes none.
        store_every: Steps between two commits in storage.
        tolerance: How many lost nodes are to be survived.
        preference: How.
        budget_bytes: What each keeper says that snapshots may take; 0 if it does not say.
        costs: What rank 0 says that saves cost; None if their intervals are not to be chosen.
        copy_s: How long a copy or a parity takes at most; from the length of a step on, steps are
            skipped.
    """

    snapshot_every: int
    store_every: int
    tolerance: int
    preference: Preference = Preference.COPY
    budget_bytes: int = 0
    costs: SaveCosts | None = None
    copy_s: float = COPY_S

    @property
    def commit_every(self) -> int:
        """Return the number that the steps of all commits but yields are multiples of."""
        return 1 if self.snapshot_every else self.store_every

    @property
    def loses_one_step(self) -> bool:
        """Return whether a single fault may cost no more than one step."""
        is_fast = self.copy_s + _WRITE_S < STEP_S
        is_roomy = not self.budget_bytes
        return self.snapshot_every == 1 and self.tolerance > 0 and is_fast and is_roomy


def save_step(
    cluster: SimCluster, attempt: SimAttempt, members: list[SimWorker], *, last: bool
) -> bool:
    """Save the step that was just completed, if it is due; return whether trainers store it."""
    tiers, step = cluster.tiers, attempt.step
    is_due = step % attempt.store_every == 0
    if not tiers.snapshot_every:
        by_trainers = last or attempt.yielding or is_due
    else:
        by_trainers = last or (attempt.yielding and attempt.durable)
        if attempt.yielding or (step % tiers.snapshot_every == 0 and not attempt.num_uncopied):
            is_due = is_due and not by_trainers and attempt.storing_until_s <= cluster.now_s
            _snapshot(cluster, attempt, members, store=is_due)
    if by_trainers:
        attempt.records[step] = set()
        for rank, worker in enumerate(members):
            delay_s = _WRITE_S * cluster.rng.random()
            cluster.at(delay_s, _write, cluster, attempt, worker, rank, step)
    return by_trainers


def final_snapshot(cluster: SimCluster, attempt: SimAttempt, worker: SimWorker) -> None:
    """Take a last snapshot of a member that lives and leaves early, if memory lacks its step."""
    resume_step = attempt.lineage[-1][1]
    is_new = resume_step < worker.completed < cluster.rules.total_steps
    if not cluster.tiers.snapshot_every or not worker.formed or not is_new:
        return
    rank = attempt.members.index(worker.name)
    part = Part(worker.completed, attempt.number, rank, len(attempt.members))
    if cluster.memory.has(worker.node.name, worker.name, part):
        return
    if cluster.chance(_UPDATING):
        cluster.monitor.is_state_gone = True
        return
    _keep(cluster, attempt, worker, part)


def _write(
    cluster: SimCluster, attempt: SimAttempt, worker: SimWorker, rank: int, step: int
) -> None:
    """Write one rank's record to storage; with the last one the version is committed."""
    if worker.alive and worker.attempt == attempt.number and not worker.hung:
        _record(cluster, attempt, rank, step)


def _record(cluster: SimCluster, attempt: SimAttempt, rank: int, step: int) -> None:
    records = attempt.records[step]
    records.add(rank)
    if len(records) == len(attempt.members):
        cluster.storage.commit(step, attempt.number, cluster.now_s)
        cluster.post_or_lose(ev.CheckpointCommitted, attempt=attempt.number, step=step)


def _snapshot(
    cluster: SimCluster, attempt: SimAttempt, members: list[SimWorker], *, store: bool
) -> None:
    if store:
        attempt.records[attempt.step] = set()
        attempt.storing_until_s = cluster.now_s + _WRITE_S + _STORE_S
    for rank, worker in enumerate(members):
        part = Part(attempt.step, attempt.number, rank, len(members))
        cluster.at(_WRITE_S * cluster.rng.random(), _finish, cluster, attempt, worker, part, store)


def _finish(
    cluster: SimCluster,
    attempt: SimAttempt,
    worker: SimWorker,
    part: Part,
    store: bool,  # noqa: FBT001
) -> None:
    """Complete one rank's snapshot; its node's keeper and those that copy it go on from there."""
    if not worker.alive or worker.attempt != attempt.number or worker.hung:
        return
    node = worker.node
    if _keep(cluster, attempt, worker, part):
        _protect(cluster, attempt, part)
    if store:
        delay_s = _STORE_S * cluster.rng.random()
        cluster.at(delay_s, _store, cluster, attempt, worker, part)
    for copier in attempt.copiers[node.name]:
        # A keeper that is not there does not attend, and nobody waits for it.
        if serves(cluster.nodes[copier], cluster.now_s) and serves(node, cluster.now_s):
            attempt.num_uncopied += 1
            delay_s = cluster.tiers.copy_s * cluster.rng.random()
            cluster.at(delay_s, _copy, cluster, attempt, worker, part, copier)


def _keep(cluster: SimCluster, attempt: SimAttempt, worker: SimWorker, part: Part) -> bool:
    """Hold a rank's part, and what it saves for others; return whether the version is whole."""
    memory, node, now_s = cluster.memory, worker.node.name, cluster.now_s
    memory.write(node, worker.name, part, attempt.lineage)
    is_whole = memory.finished(part, now_s)
    for number, rank in enumerate(attempt.plan.guards[part.rank] if attempt.plan.guards else ()):
        share = part._replace(rank=rank)
        memory.write(node, guard_name(number, worker.name), share, attempt.lineage)
        is_whole |= memory.finished(share, now_s)
    if is_whole and attempt.first_kept_step is None:
        attempt.first_kept_step = part.step
    if is_whole and not attempt.plan.is_final:
        cluster.measure()
    return is_whole


def _protect(cluster: SimCluster, attempt: SimAttempt, part: Part) -> None:
    """Have every group keep parities of a version that all ranks have finished."""
    for group in attempt.plan.groups if attempt.plan.is_parity else ():
        if all(serves(cluster.nodes[name], cluster.now_s) for name in group):
            for name in group:
                attempt.num_uncopied += 1
                delay_s = cluster.tiers.copy_s * cluster.rng.random()
                cluster.at(delay_s, _encode, cluster, attempt, part, name)


def _encode(cluster: SimCluster, attempt: SimAttempt, part: Part, keeper: str) -> None:
    """Keep a node's parities of a version, of which all parts of the group are still there."""
    attempt.num_uncopied -= 1
    group = attempt.plan.group_of(keeper)
    if not group:
        return  # it was told otherwise meanwhile
    for rank, (worker, node, _) in enumerate(attempt.placed):
        if node in group:
            one = Part(part.step, part.attempt, rank, part.world_size)
            is_there = serves(cluster.nodes[node], cluster.now_s)
            is_there = is_there and cluster.memory.has(node, worker, one)
            if not is_there or cluster.is_damaged(node, worker, one):
                return
    place = group.index(keeper)
    block = part._replace(rank=-1 - place)
    for lane, members in enumerate(attempt.lanes(group)):
        parity = HeldParity(
            arena=f"parity/{lane}.{part.attempt}",
            held=block.held(),
            num_parities=attempt.plan.tolerance,
            place=place,
            members=members,
        )
        cluster.memory.write_parity(keeper, parity)
        cluster.memory.copied.append((cluster.now_s, keeper, parity.arena, block))


def _copy(
    cluster: SimCluster, attempt: SimAttempt, worker: SimWorker, part: Part, copier: str
) -> None:
    attempt.num_uncopied -= 1
    node, now_s = worker.node, cluster.now_s
    is_there = serves(node, now_s) and cluster.memory.has(node.name, worker.name, part)
    if is_there and serves(cluster.nodes[copier], now_s):
        arena = f"{node.name}/{worker.name}"
        cluster.memory.write(copier, arena, part, attempt.lineage)
        cluster.memory.copied.append((now_s, copier, arena, part))
        if cluster.is_damaged(node.name, worker.name, part):
            cluster.damaged.add(part.source(copier, arena))


def _store(cluster: SimCluster, attempt: SimAttempt, worker: SimWorker, part: Part) -> None:
    """Store a part that is still held, be its worker alive or not."""
    node = worker.node
    is_there = cluster.memory.has(node.name, worker.name, part)
    # What is stored is checked on its way.
    is_whole = is_there and not cluster.is_damaged(node.name, worker.name, part)
    if serves(node, cluster.now_s) and is_whole:
        _record(cluster, attempt, part.rank, part.step)
