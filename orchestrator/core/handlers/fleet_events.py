"""Events about nodes, reservations and worker processes."""

from math import inf

from orchestrator.core.actions import (
    GiveUpNode,
    KillWorker,
    ReleaseReservation,
    RestartKeeper,
    StartKeeper,
)
from orchestrator.core.consequences import (
    AttemptFailed,
    CapacityChanged,
    IdleLoss,
    MemoryLost,
)
from orchestrator.core.events import (
    ControllerDraining,
    KeeperDied,
    KeeperReady,
    KeeperSilent,
    NodeDraining,
    NodeJoined,
    NodeLost,
    ReservationGranted,
    StartsAdvanced,
    WorkerExited,
    WorkerReady,
)
from orchestrator.core.handlers import demand, fleet, recovery
from orchestrator.core.network import links, search
from orchestrator.core.state import CONTROLLER, Slow, WorkerStatus
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind


def node_joined(transition: Transition, event: NodeJoined) -> None:
    """Note that a node has joined, perhaps again."""
    number = fleet.find_node(transition, event.node)
    node = transition.run.fleet.nodes[number]
    if node.rack != event.rack:
        fleet.put_node(transition, number, node._replace(rack=event.rack))
    if not node.alive or node.draining:
        fleet.revive_node(transition, number)
        demand.release_surplus(transition)
        # Pending reservations may exclude this node.
        demand.renew_pending(transition)
    if node.is_kept:
        # A restarted controller has no handle of the node's keeper.
        transition.actions.append(StartKeeper(node=event.node))


def keeper_ready(transition: Transition, event: KeeperReady) -> None:
    """Note that a keeper is up; an earlier controller may have started it."""
    number = transition.run.fleet.node_ids.get(event.node)
    if number is not None and not transition.run.fleet.nodes[number].is_kept:
        node = transition.run.fleet.nodes[number]
        fleet.put_node(transition, number, node._replace(is_kept=True))
    _expect_keeper(transition, event.node, inf)


def keeper_died(transition: Transition, event: KeeperDied) -> None:
    """Wait for a keeper that died; training continues while its node lives."""
    by_s = transition.now_s + transition.rules.bounds.keeper_return_s
    _expect_keeper(transition, event.node, by_s)
    transition.wake_by(by_s)


def keeper_died_waiting(transition: Transition, event: KeeperDied) -> None:
    """Wait for the keeper, and read again: versions that no living worker holds are lost."""
    keeper_died(transition, event)
    transition.follow(MemoryLost())
    recovery.advance(transition)


def keeper_silent(transition: Transition, event: KeeperSilent) -> None:
    """Wait for a silent keeper; restart it if members wait for it or it stays silent."""
    nodes, bounds = transition.run.fleet, transition.rules.bounds
    number = nodes.node_ids.get(event.node)
    if number is None or not nodes.nodes[number].alive or not nodes.nodes[number].is_kept:
        return
    if nodes.nodes[number].keeper_by_s == inf:
        by_s = transition.now_s + bounds.keeper_return_s
        _expect_keeper(transition, event.node, by_s)
        transition.wake_by(by_s)
    if event.is_awaited or event.silent_s >= bounds.keeper_silent_s:
        reason = f"silent for {event.silent_s:.3g} s"
        transition.actions.append(RestartKeeper(node=event.node, reason=reason))


def _expect_keeper(transition: Transition, name: str, by_s: float) -> None:
    run = transition.run
    number = run.fleet.node_ids.get(name)
    if number is not None and run.fleet.nodes[number].alive and run.fleet.nodes[number].is_kept:
        # No count of the fleet depends on this, so ``put_node`` is not needed.
        node = run.fleet.nodes[number]._replace(keeper_by_s=by_s)
        run.fleet.nodes = run.fleet.nodes.set(number, node)


def give_up_node(transition: Transition, number: int) -> None:
    """Treat a node as lost: its keeper did not come back, so nothing on it would be saved."""
    node = transition.run.fleet.nodes[number]
    bound_s = transition.rules.bounds.keeper_return_s
    reason = f"its keeper was not back after {bound_s:g} s"
    transition.actions.append(GiveUpNode(node=node.name, reason=reason))
    lose_node(transition, number, reason)


def node_lost(transition: Transition, event: NodeLost) -> None:
    """Treat everything on the node as gone, unless the node is lost already."""
    number = transition.run.fleet.node_ids.get(event.node)
    if number is not None and transition.run.fleet.nodes[number].alive:
        lose_node(transition, number, event.cause)


def lose_node(transition: Transition, number: int, cause: str) -> None:
    """Drop the node's workers and reservations. If a member was there, the attempt ends."""
    run = transition.run
    node = run.fleet.nodes[number]
    names = [run.fleet.workers[worker].name for worker in node.workers]
    members: list[str] = []
    for worker_number in node.workers:
        worker = run.fleet.workers[worker_number]
        if worker_number in run.attempt.inside:
            members.append(worker.name)
        fleet.drop_worker(transition, worker_number)
        # If the node is only cut off, its workers still train: kill those that the shell can reach.
        transition.actions.append(KillWorker(worker=worker.name, reason=f"node lost: {cause}"))
    demand.release_reservations(transition, node.reservations)
    preempted = run.fleet.nodes[number].is_taken
    known = run.network.links
    run.network = run.network._replace(links=links.without(known, node.name))
    had_links = len(run.network.links) < len(known)
    if not preempted:
        search.note(transition, [(CONTROLLER, node.name)])
    node = run.fleet.nodes[number]._replace(alive=False, keeper_by_s=inf, budget_bytes=0)
    fleet.put_node(transition, number, node)
    transition.follow(MemoryLost())
    kind = FaultKind.PREEMPTION if preempted else FaultKind.NODE_LOSS
    if members:
        evidence = f"node {node.name[:8]}: {cause}"
        transition.follow(AttemptFailed(kind, tuple(members), evidence))
    else:
        if names:
            evidence = f"node {node.name[:8]} with {', '.join(names)}: {cause}"
            transition.follow(IdleLoss(kind, evidence))
        recovery.advance(transition)
    if had_links:
        # A node that was given up because it did not reach this one may be used again.
        demand.renew_pending(transition)
    # The first attempt does not wait for replacements, so it may start now.
    transition.follow(CapacityChanged())


def node_draining(transition: Transition, event: NodeDraining) -> None:
    """Note a drain notice; ``planned`` makes members leave the node in time."""
    number = fleet.find_node(transition, event.node)
    node = transition.run.fleet.nodes[number]
    if node.leave_by_s != event.deadline_s:
        drained = node._replace(leave_by_s=event.deadline_s, notice=event.notice, slow=Slow())
        fleet.put_node(transition, number, drained)
        if not drained.draining:
            demand.renew_pending(transition)
        transition.follow(CapacityChanged())


def controller_draining(transition: Transition, event: ControllerDraining) -> None:
    """Note when the controller's machine is taken; ``planned`` stores the state before that."""
    transition.run.store_by_s = event.deadline_s


def reservation_granted(transition: Transition, event: ReservationGranted) -> None:
    """Use a granted reservation, or release it if the run no longer needs it."""
    run = transition.run
    reservation = run.fleet.reservations.get(event.reservation)
    if reservation is None:
        transition.actions.append(ReleaseReservation(reservation=event.reservation))
        return
    number = fleet.find_node(transition, event.node)
    if reservation.node == number:
        return
    if reservation.node >= 0 or run.fleet.nodes[number].draining:
        # Ray moved it, or its node is about to leave: request another one.
        if reservation.node < 0:
            # Renew first: Ray would place another pending request there next.
            demand.renew_pending(transition)
        if event.reservation in run.fleet.reservations:
            demand.release_reservations(transition, [event.reservation])
        return
    if not run.fleet.nodes[number].alive:
        fleet.revive_node(transition, number)
    fleet.place_reservation(transition, event.reservation, number)
    transition.follow(CapacityChanged())


def starts_advanced(transition: Transition, event: StartsAdvanced) -> None:
    """Give processes that compute more time to get ready, up to the maximum."""
    bounds = transition.rules.bounds
    for name in event.workers:
        found = fleet.find_worker(transition, name)
        if found is not None and found[1].status is WorkerStatus.STARTING:
            number, worker = found
            by_s = min(
                max(worker.deadline_s, event.at_s + bounds.start_s),
                worker.begun_s + bounds.start_s_max,
            )
            fleet.put_worker(transition, number, worker._replace(deadline_s=by_s))
            transition.wake_by(by_s)


def worker_ready(transition: Transition, event: WorkerReady) -> None:
    """Note that a process is ready to be assigned."""
    found = fleet.find_worker(transition, event.worker)
    if found is None or found[1].status is not WorkerStatus.STARTING:
        return
    run = transition.run
    number, worker = found
    run.fleet.num_failed_starts = 0
    node = run.fleet.nodes[worker.node]
    if node.num_failed_starts:
        fleet.put_node(transition, worker.node, node._replace(num_failed_starts=0))
    ready = worker._replace(status=WorkerStatus.READY, deadline_s=inf, pid=event.pid)
    fleet.put_worker(transition, number, ready)
    transition.follow(CapacityChanged())


def worker_exited(transition: Transition, event: WorkerExited) -> None:
    """Forget a process that is gone; if it was inside the attempt, the attempt ends."""
    found = fleet.find_worker(transition, event.worker)
    if found is None:
        return
    run = transition.run
    number, worker = found
    node = run.fleet.nodes[worker.node]
    if event.cause == "node" and node.alive:
        lose_node(transition, worker.node, event.detail)
        return
    was_inside = number in run.attempt.inside
    fleet.drop_worker(transition, number)
    has_died = event.cause in (FaultKind.CRASH, FaultKind.OUT_OF_MEMORY)
    if worker.status is WorkerStatus.STARTING and has_died:
        demand.note_failed_start(transition, worker.node, event.detail)
    elif worker.status is WorkerStatus.READY and has_died:
        fleet.strike(transition, worker.node)
    demand.release_failing_reservations(transition, worker.node)
    if not was_inside:
        transition.follow(CapacityChanged())
        return
    if worker.status is not WorkerStatus.DYING:
        preempted = event.cause == "preempted" or node.is_taken
        is_short = event.cause == FaultKind.OUT_OF_MEMORY
        kind = FaultKind.OUT_OF_MEMORY if is_short else FaultKind.CRASH
        kind = FaultKind.PREEMPTION if preempted else kind
        transition.follow(AttemptFailed(kind, (worker.name,), event.detail))
    else:
        recovery.advance(transition)
