"""Request as many reservations as the run may use, and start worker processes on them.

The ``settle`` functions run after every event, so no other code has to make requests.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from orchestrator.core.actions import (
    NoteRefused,
    ReleaseReservation,
    RequestReservation,
    StartWorker,
)
from orchestrator.core.consequences import EventFolded, ReachChanged
from orchestrator.core.events import CapacityRefused
from orchestrator.core.handlers import fleet
from orchestrator.core.network import reach
from orchestrator.core.state import Node, Phase, RunOutcome, WorkerStatus, is_pending
from orchestrator.core.transition import Transition
from orchestrator.policies import capacity


def settle(transition: Transition, _: EventFolded) -> None:
    """Request missing reservations; start no processes, which would slow down the recovery.

    Importing torch takes a core several seconds. If enough workers are left, replacements start
    after the attempt's first step.
    """
    _settle(transition, trains=False)


def settle_waiting(transition: Transition, _: EventFolded) -> None:
    """Request missing reservations and start missing workers."""
    if _settle(transition, trains=False):
        _staff_nodes(transition, trains=False)


def settle_training(transition: Transition, _: EventFolded) -> None:
    """Request missing reservations; start missing workers and standbys after the first step."""
    trains = transition.run.attempt.stepped
    if _settle(transition, trains=trains) and trains:
        _staff_nodes(transition, trains=True)


def _settle(transition: Transition, *, trains: bool) -> bool:
    """Request what is missing; return False while the run does not know what it has."""
    run = transition.run
    if run.surveying_until_s != inf:
        return False
    _look_at_offers(transition)
    if transition.rules.capacity.has_choice:
        _settle_alternatives(transition, trains=trains)
    elif run.fleet.num_reservations < transition.max_workers:
        _request(transition)
    elif transition.is_limited:
        # Other runs need it.
        _give_back(transition, run.fleet.num_reservations - transition.max_workers)
    return True


def _staff_nodes(transition: Transition, *, trains: bool) -> None:
    fleet = transition.run.fleet
    if any(_is_left(transition, number) for number in fleet.short):
        # Renew first: Ray would place pending requests in the room that is released.
        renew_pending(transition)
    for number in fleet.short:
        _staff(transition, number, trains=trains)
    # Releasing a reservation or killing a worker lists its node again, but these were handled.
    fleet.short = ()


def _is_left(transition: Transition, number: int) -> bool:
    """Return whether the run leaves a node while it holds unused reservations there."""
    node = transition.run.fleet.nodes[number]
    trains = transition.run.phase is Phase.TRAINING
    return node.draining and trains and bool(fleet.free_reservations(transition, node))


def renew_pending(transition: Transition) -> None:
    """Request pending reservations again if the nodes to avoid have changed.

    Call it before room becomes free on a node to avoid, and when a node need no longer be avoided.
    A drain notice alone frees no room, and each renewal costs as much as all pending requests.
    """
    run = transition.run
    avoid = avoided_nodes(transition)
    pending = sorted(_outdated(transition, avoid))
    offers = run.fleet.offers
    counts = Counter(run.fleet.reservations[number].alternative for number in pending)
    fleet.drop_pending(transition, pending)
    transition.actions += (ReleaseReservation(reservation=number) for number in pending)
    if transition.rules.capacity.has_choice:
        for alternative, num in sorted(counts.items()):
            _request_some(transition, avoid, alternative, num)
    else:
        _request(transition)
    for alternative, before in enumerate(offers):
        after = run.fleet.offers[alternative]
        if before.num_pending and after.num_pending:
            # Renewing does not restart the wait for a grant.
            since_s, refused_s = before.since_s, before.refused_s
            asked = after._replace(since_s=since_s, refused_s=refused_s)
            fleet.put_offer(transition, alternative, asked)


def _outdated(transition: Transition, avoid: tuple[str, ...]) -> list[int]:
    """Return the pending reservations that exclude other nodes than ``avoid``."""
    fleet = transition.run.fleet
    # Reservations that were requested together share the object ``avoid``.
    known: dict[int, bool] = {}
    found: list[int] = []
    for number, reservation in fleet.reservations.where(is_pending):
        is_old = known.get(id(reservation.avoid))
        if is_old is None:
            there = (n for n in reservation.avoid if fleet.nodes[fleet.node_ids[n]].alive)
            is_old = known[id(reservation.avoid)] = tuple(there) != avoid
        if is_old:
            found.append(number)
    return found


def forgive_nodes(transition: Transition) -> None:
    """Stop avoiding nodes: the run needs all of them to reach its minimum."""
    for number, node in transition.run.fleet.nodes.where(_may_be_avoided):
        if node.avoid_until_s > transition.now_s:
            fleet.put_node(
                transition, number, node._replace(avoid_until_s=transition.now_s, strikes=())
            )
    renew_pending(transition)


def avoided_nodes(transition: Transition) -> tuple[str, ...]:
    """Return the names of the nodes to request nothing on, sorted."""
    now_s = transition.now_s
    given_up = reach.given_up(transition)
    nodes = transition.run.fleet.nodes
    found = {number for number in given_up if nodes[number].alive}
    for number, node in nodes.where(_may_be_avoided):
        if node.alive and (node.draining or node.avoid_until_s > now_s):
            found.add(number)
    return tuple(sorted(nodes[number].name for number in found))


def _may_be_avoided(node: Node) -> bool:
    return node.draining or node.avoid_until_s > 0.0


def release_reservations(transition: Transition, numbers: Sequence[int]) -> None:
    """Release reservations; ``settle`` requests others if the run needs them."""
    fleet.drop_reservations(transition, numbers)
    transition.actions += (ReleaseReservation(reservation=number) for number in numbers)


def release_failing_reservations(transition: Transition, number: int) -> None:
    """Release the unused reservations of an avoided node if the run can do without them.

    A node where no process starts may be gone, so it is released in any case.
    """
    node = transition.run.fleet.nodes[number]
    if node.avoid_until_s <= transition.now_s:
        return
    # Renew first: Ray would place pending requests in the room that is released.
    renew_pending(transition)
    nothing_starts = node.num_failed_starts >= transition.rules.avoid.strikes_max
    if transition.run.fleet.num_usable < transition.rules.min_workers and not nothing_starts:
        return
    busy = [transition.run.fleet.workers[w].status for w in node.workers].count(WorkerStatus.READY)
    free = fleet.free_reservations(transition, node)
    release_reservations(transition, free[: len(node.reservations) - busy])


def capacity_refused(transition: Transition, event: CapacityRefused) -> None:
    """Request the next alternative at once: the provider has no machine for this one."""
    if fleet.offer(transition, event.alternative).refused_s == inf:
        _refuse(transition, event.alternative, event.why)


def _refuse(transition: Transition, alternative: int, why: str) -> None:
    offer = fleet.offer(transition, alternative)
    if offer.num_pending:
        fleet.put_offer(
            transition, alternative, offer._replace(refused_s=transition.now_s, why=why)
        )
        transition.actions.append(
            NoteRefused(alternative=alternative, num_reservations=offer.num_pending, why=why)
        )


def _look_at_offers(transition: Transition) -> None:
    """Count requests that were not granted in time as refused."""
    for alternative, offer in enumerate(transition.run.fleet.offers):
        by_s = _refused_by_s(transition, alternative)
        if by_s <= transition.now_s:
            waited_s = transition.now_s - offer.since_s
            _refuse(transition, alternative, f"nothing was granted for {waited_s:.0f} s")
        elif by_s != inf:
            transition.wake_by(by_s)


def _settle_alternatives(transition: Transition, *, trains: bool) -> None:
    """Request from each alternative what the better ones have refused to grant.

    A refused request stays open: a grant shows that its capacity is back. Reservations of worse
    alternatives are released once no member uses them; ``planned`` moves the members.
    """
    run, max_workers = transition.run, transition.max_workers
    staying, pending = Counter[int](), dict[int, list[int]]()
    for number, reservation in run.fleet.reservations.items():
        if reservation.node < 0:
            pending.setdefault(reservation.alternative, []).append(number)
        elif not run.fleet.nodes[reservation.node].draining:
            staying[reservation.alternative] += 1
    num_had, avoid = 0, None
    is_refused = True
    for alternative in range(len(transition.rules.capacity.usd_per_hour)):
        num_had += staying[alternative]
        num_missing = max(max_workers - num_had, 0) if is_refused else 0
        asked = sorted(pending.get(alternative, ()))
        release_reservations(transition, asked[num_missing:])
        if num_missing > len(asked):
            avoid = avoided_nodes(transition) if avoid is None else avoid
            _request_some(transition, avoid, alternative, num_missing - len(asked))
        is_refused = is_refused and fleet.offer(transition, alternative).refused_s != inf
    if num_had > max_workers and (trains or transition.is_limited):
        _release_worst(transition, num_had - max_workers)


def _give_back(transition: Transition, num_surplus: int, *, placed: bool = True) -> None:
    """Release this many reservations, but none that members use: ``planned`` moves those first."""
    reservations = transition.run.fleet.reservations
    pending = sorted(number for number, _ in reservations.where(is_pending))
    release_reservations(transition, pending[::-1][:num_surplus])
    if placed and num_surplus > len(pending):
        _release_worst(transition, num_surplus - len(pending))


def _release_worst(transition: Transition, num_surplus: int) -> None:
    run = transition.run
    used = set(run.fleet.bound.values())
    placed = [
        number
        for number, reservation in run.fleet.reservations.items()
        if reservation.node >= 0 and not run.fleet.nodes[reservation.node].draining
    ]
    order = sorted(placed, key=lambda n: (run.fleet.reservations[n].alternative, n not in used, n))
    worst = order[-num_surplus:]
    release_reservations(transition, [number for number in worst if number not in used])


def _request(transition: Transition) -> None:
    num_missing = transition.max_workers - transition.run.fleet.num_reservations
    if num_missing > 0:
        _request_some(transition, avoided_nodes(transition), 0, num_missing)


def _request_some(
    transition: Transition, avoid: tuple[str, ...], alternative: int, num: int
) -> None:
    numbers = fleet.add_reservations(transition, avoid, alternative, num)
    price = transition.rules.capacity.usd_per_hour[alternative]
    transition.actions += (
        RequestReservation(
            reservation=number, avoid=avoid, alternative=alternative, usd_per_hour=price
        )
        for number in numbers
    )
    transition.wake_by(_refused_by_s(transition, alternative))


def _refused_by_s(transition: Transition, alternative: int) -> float:
    """Return when requests for an alternative count as refused without a grant; or infinity."""
    offer = fleet.offer(transition, alternative)
    if offer.refused_s != inf:
        return inf
    return offer.since_s + capacity.grant_bound_s(offer.took_s, transition.rules.capacity)


def request(transition: Transition, number: int) -> RequestReservation:
    """Return the order that requests a reservation."""
    reservation = transition.run.fleet.reservations[number]
    return RequestReservation(
        reservation=number,
        avoid=reservation.avoid,
        alternative=reservation.alternative,
        usd_per_hour=transition.rules.capacity.usd_per_hour[reservation.alternative],
    )


def _staff(transition: Transition, number: int, *, trains: bool) -> None:
    """Start the processes that a node lacks and kill surplus ones."""
    run = transition.run
    node = run.fleet.nodes[number]
    wanted = allowed = 0
    if node.alive and node.reservations and not node.draining:
        wanted = len(node.reservations)
        allowed = wanted + transition.rules.standby_per_node
        if trains:
            # Standbys start last: until the first step the members need the cores.
            wanted = allowed
    live = [w for w in node.workers if run.fleet.workers[w].status is not WorkerStatus.DYING]
    if len(live) < wanted:
        if node.retry_s > transition.now_s:
            transition.wake_by(node.retry_s)
            return
        names = fleet.add_workers(transition, number, wanted - len(live))
        transition.actions += (StartWorker(worker=name, node=node.name) for name in names)
    elif len(live) > allowed and node.alive:
        idle = [w for w in live if w not in run.attempt.inside and w not in run.fleet.bound]
        surplus = sorted(idle, reverse=True)[: len(live) - allowed]
        fleet.kill_workers(transition, surplus, "no reservation for it on its node")
    if _is_left(transition, number):
        free = fleet.free_reservations(transition, run.fleet.nodes[number])
        release_reservations(transition, free)


def reach_changed(transition: Transition, _: ReachChanged) -> None:
    """Request other nodes, or stop avoiding some, because links have changed."""
    replace_unreached(transition)


def replace_unreached(transition: Transition) -> None:
    """Request other nodes in place of those whose links have been lost for too long."""
    for number in sorted(reach.given_up(transition)):
        release_reservations(transition, transition.run.fleet.nodes[number].reservations)
    # If a link is whole again, its nodes no longer need to be avoided.
    renew_pending(transition)


def release_surplus(transition: Transition) -> None:
    """Release surplus reservations, for example after a drain notice was withdrawn.

    Unless members train, release only pending ones: the next attempt may need the granted ones.
    """
    run = transition.run
    num_surplus = run.fleet.num_reservations - transition.max_workers
    # Refused requests stay open; ``settle`` handles each alternative.
    if num_surplus > 0 and not transition.rules.capacity.has_choice:
        _give_back(transition, num_surplus, placed=run.phase is Phase.TRAINING)


def give_up_starting(transition: Transition) -> None:
    """End the run if too many processes died at their start and no worker is ready."""
    run = transition.run
    live = any(worker.status is WorkerStatus.READY for worker in run.fleet.workers.values())
    if not live and run.phase is Phase.WAITING:
        transition.finish(
            RunOutcome.FAILED,
            f"{run.fleet.num_failed_starts} worker processes in a row did not start; "
            f"the last: {run.fleet.failed_start}",
        )


def note_failed_start(transition: Transition, number: int, detail: str) -> None:
    """Note a process that died at its start, and pause on its node, longer each time."""
    run = transition.run
    run.fleet.num_failed_starts += 1
    run.fleet.failed_start = detail
    if run.fleet.num_failed_starts >= transition.rules.starts_failed_max:
        transition.wake_by(transition.now_s)
    fleet.strike(transition, number)
    node = run.fleet.nodes[number]
    # 2^6 times the first pause is about the time in which people notice a broken node.
    pause_s = transition.rules.bounds.backoff_s * 2.0 ** min(node.num_failed_starts, 6)
    fleet.put_node(
        transition,
        number,
        node._replace(
            num_failed_starts=node.num_failed_starts + 1, retry_s=transition.now_s + pause_s
        ),
    )
