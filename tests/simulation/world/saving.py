"""How the virtual cluster saves a step: snapshots in memory, protected there, and storage.

With snapshots on, trainers write to memory only and keepers store what is due; what must be in
storage at once (the last step, a durable yield) trainers write themselves. Without them trainers
write everything.
"""

from orchestrator.core import events as ev
from orchestrator.policies import versions
from tests.simulation.world.memory import Part, answers, serves
from tests.simulation.world.parts import STEP_S, WRITE_S, SimAttempt, SimWorker
from tests.simulation.world.wires import World
from workers.memory import guard_name
from workers.protocol import Covered, PartRef

#: A store by a keeper takes up to this long.
_STORE_S = 3.0 * STEP_S

#: Chance that a member that leaves is in the middle of an update, and so has the state of no step.
_UPDATING = 0.1


def save_step(world: World, attempt: SimAttempt, members: list[SimWorker], *, last: bool) -> bool:
    """Save the step that was just completed, if it is due; return whether trainers store it."""
    tiers, step = world.tiers, attempt.step
    is_due = step % attempt.store_every == 0
    if not tiers.snapshot_every:
        by_trainers = last or attempt.yielding or is_due
    else:
        by_trainers = last or (attempt.yielding and attempt.durable)
        if attempt.yielding or (step % tiers.snapshot_every == 0 and not attempt.num_uncopied):
            is_due = is_due and not by_trainers and attempt.storing_until_s <= world.now_s
            _snapshot(world, attempt, members, store=is_due)
    if by_trainers:
        attempt.records[step] = set()
        for rank, worker in enumerate(members):
            delay_s = WRITE_S * world.rng.random()
            world.at(delay_s, _write, world, attempt, worker, rank, step)
    return by_trainers


def final_snapshot(world: World, attempt: SimAttempt, worker: SimWorker) -> None:
    """Take a last snapshot of a member that lives and leaves early, if memory lacks its step."""
    resume_step = attempt.lineage[-1][1]
    is_new = resume_step < worker.completed < world.rules.total_steps
    if not world.tiers.snapshot_every or not worker.formed or not is_new:
        return
    rank = attempt.members.index(worker.name)
    part = Part(worker.completed, attempt.number, rank, len(attempt.members))
    if world.memory.has(worker.node.name, worker.name, part):
        return
    if world.chance(_UPDATING):
        world.monitor.is_state_gone = True
    elif _has_memory(world, worker):
        _keep(world, attempt, worker, part)


def _has_memory(world: World, worker: SimWorker) -> bool:
    """Return whether there was a keeper, from which a worker gets the memory for its snapshots."""
    if not worker.node.has_keeper:
        world.monitor.is_state_gone = world.monitor.is_unkept = True
    return worker.node.has_keeper


def _write(world: World, attempt: SimAttempt, worker: SimWorker, rank: int, step: int) -> None:
    """Write one rank's record to storage; with the last one the version is committed."""
    if world.now_s < world.storage.back_s:
        world.at(_back_s(world), _write, world, attempt, worker, rank, step)
    elif worker.alive and worker.attempt == attempt.number and not worker.hung:
        _record(world, attempt, rank, step)


def _record(world: World, attempt: SimAttempt, rank: int, step: int) -> None:
    records = attempt.records[step]
    records.add(rank)
    if len(records) == len(attempt.members):
        world.storage.commit(step, attempt.number, world.now_s)
        world.post_or_lose(ev.CheckpointCommitted, attempt=attempt.number, step=step)


def _snapshot(world: World, attempt: SimAttempt, members: list[SimWorker], *, store: bool) -> None:
    if store:
        attempt.records[attempt.step] = set()
        attempt.storing_until_s = world.now_s + WRITE_S + _STORE_S
    for rank, worker in enumerate(members):
        part = Part(attempt.step, attempt.number, rank, len(members))
        world.at(WRITE_S * world.rng.random(), _finish, world, attempt, worker, part, store)


def _finish(
    world: World,
    attempt: SimAttempt,
    worker: SimWorker,
    part: Part,
    store: bool,  # noqa: FBT001
) -> None:
    """Complete one rank's snapshot; its node's keeper and those that copy it go on from there."""
    if not worker.alive or worker.attempt != attempt.number or worker.hung:
        return
    if not _has_memory(world, worker):
        return
    node = worker.node
    if _keep(world, attempt, worker, part):
        _protect(world, attempt, part)
    if store:
        delay_s = _STORE_S * world.rng.random()
        world.at(delay_s, _store, world, attempt, worker, part)
    for copier in attempt.copiers[node.name]:
        # A missing keeper does not attend, and no rank waits for it.
        is_there = serves(world.nodes[copier], world.now_s) and serves(node, world.now_s)
        if is_there and not world.lost_way((copier, node.name)):
            attempt.num_uncopied += 1
            delay_s = world.tiers.copy_s * world.rng.random()
            world.at(delay_s, _copy, world, attempt, worker, part, copier)


def _keep(world: World, attempt: SimAttempt, worker: SimWorker, part: Part) -> bool:
    """Hold a rank's part, and what it saves for others; return whether the version is whole."""
    memory, node, now_s = world.memory, worker.node.name, world.now_s
    memory.write(node, worker.name, part, attempt.lineage)
    is_whole = memory.finished(part, now_s)
    for number, rank in enumerate(attempt.plan.guards[part.rank] if attempt.plan.guards else ()):
        share = part._replace(rank=rank)
        memory.write(node, guard_name(number, worker.name), share, attempt.lineage)
        is_whole |= memory.finished(share, now_s)
    if is_whole and attempt.first_kept_step is None:
        attempt.first_kept_step = part.step
    if is_whole and not attempt.plan.is_final:
        world.measure()
    _look_at_others(world, attempt)
    return is_whole


def _look_at_others(world: World, attempt: SimAttempt) -> None:
    """Tell the controller when its nodes hold all that is needed, and others have keepers too."""
    nodes = world.nodes.values()
    others = frozenset(node.name for node in nodes if answers(node, world.now_s)) - attempt.nodes
    if not others - attempt.needless:
        return
    is_protected = versions.protects(
        world.memory.inventories(nodes, world.now_s),
        attempt.lineage,
        attempt=attempt.number,
        nodes=attempt.nodes,
        tolerance=world.tiers.tolerance,
        total_steps=world.rules.total_steps,
    )
    if is_protected:
        attempt.needless = others
        world.post(ev.MemoryProtected, attempt=attempt.number)


def _protect(world: World, attempt: SimAttempt, part: Part) -> None:
    """Have every group keep parities of a version that all ranks have finished."""
    for group in attempt.plan.groups if attempt.plan.is_parity else ():
        is_whole = all(serves(world.nodes[name], world.now_s) for name in group)
        if is_whole and not world.lost_way(group):
            for name in group:
                attempt.num_uncopied += 1
                delay_s = world.tiers.copy_s * world.rng.random()
                world.at(delay_s, _encode, world, attempt, part, name)


def _encode(world: World, attempt: SimAttempt, part: Part, keeper: str) -> None:
    """Keep a node's parities of a version, of which all parts of the group are still there."""
    attempt.num_uncopied -= 1
    group = attempt.plan.group_of(keeper)
    if not group or world.lost_way(group):
        return  # it was told otherwise meanwhile, or cannot read them
    for rank, (worker, node, _) in enumerate(attempt.placed):
        if node in group:
            one = Part(part.step, part.attempt, rank, part.world_size)
            is_there = serves(world.nodes[node], world.now_s)
            is_there = is_there and world.memory.has(node, worker, one)
            if not is_there or world.is_damaged(node, worker, one):
                return
    place = group.index(keeper)
    block = part._replace(rank=-1 - place)
    for lane, members in enumerate(attempt.lanes(group)):
        parity = PartRef(
            node=keeper,
            arena=f"parity/{lane}.{part.attempt}",
            held=block.held(),
            covered=Covered(tolerance=attempt.plan.tolerance, place=place, members=members),
        )
        world.memory.write_parity(keeper, parity)
        world.memory.copied.append((world.now_s, keeper, parity.arena, block))
    _look_at_others(world, attempt)


def _copy(world: World, attempt: SimAttempt, worker: SimWorker, part: Part, copier: str) -> None:
    attempt.num_uncopied -= 1
    node, now_s = worker.node, world.now_s
    is_there = serves(node, now_s) and world.memory.has(node.name, worker.name, part)
    is_there = is_there and not world.lost_way((copier, node.name))
    if is_there and serves(world.nodes[copier], now_s):
        arena = f"{node.name}/{worker.name}"
        world.memory.write(copier, arena, part, attempt.lineage)
        world.memory.copied.append((now_s, copier, arena, part))
        if world.is_damaged(node.name, worker.name, part):
            world.damaged.add(part.source(copier, arena))
        _look_at_others(world, attempt)


def _store(world: World, attempt: SimAttempt, worker: SimWorker, part: Part) -> None:
    """Store a part that is still held, be its worker alive or not."""
    if world.now_s < world.storage.back_s:
        # It stays pinned until then, or is gone.
        world.at(_back_s(world), _store, world, attempt, worker, part)
        return
    node = worker.node
    is_there = world.memory.has(node.name, worker.name, part)
    # Versions are checked on their way to storage.
    is_whole = is_there and not world.is_damaged(node.name, worker.name, part)
    if serves(node, world.now_s) and is_whole:
        _record(world, attempt, part.rank, part.step)


def _back_s(world: World) -> float:
    """Return when a write that hangs is done, from now on."""
    return world.storage.back_s - world.now_s + WRITE_S * world.rng.random()
