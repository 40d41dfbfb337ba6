"""Bookkeeping of reservations, workers and nodes, with all counts of the fleet.

Except for strikes, the cost depends on the size of one node, not on that of the fleet. ``demand``
decides what to request, ``formation`` which workers train.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from orchestrator.core.actions import EndKeeper, KillWorker, StartKeeper
from orchestrator.core.network import search
from orchestrator.core.state import (
    CONTROLLER,
    Fleet,
    Node,
    Offer,
    Reservation,
    Slow,
    Worker,
    WorkerStatus,
    worker_name,
    worker_number,
)
from orchestrator.core.transition import Transition
from orchestrator.policies import capacity


def find_worker(transition: Transition, name: str) -> tuple[int, Worker] | None:
    """Return the number and record of a worker, or None if it is unknown or gone."""
    number = worker_number(name)
    worker = transition.run.fleet.workers.get(number) if number >= 0 else None
    return None if worker is None else (number, worker)


def find_node(transition: Transition, name: str) -> int:
    """Return the number of a node; add the node if it is new."""
    run = transition.run
    number = run.fleet.node_ids.get(name)
    if number is None:
        number = len(run.fleet.node_ids)
        run.fleet.node_ids = {**run.fleet.node_ids, name: number}
        run.fleet.nodes = run.fleet.nodes.set(number, Node(name=name, joined_s=transition.now_s))
    return number


def put_node(transition: Transition, number: int, node: Node) -> None:
    """Store ``node``; recount its usable workers and update the fleet's counts."""
    run = transition.run
    before = run.fleet.nodes[number]
    usable = 0
    if node.alive and node.reservations:
        workers = run.fleet.workers
        num_ready = [workers[w].status for w in node.workers].count(WorkerStatus.READY)
        usable = min(len(node.reservations), num_ready)
    # Inlined ``Node.draining``: nearly every event comes here.
    was_leaving, is_leaving = before.leave_by_s != inf, node.leave_by_s != inf
    if not was_leaving:
        run.fleet.num_reservations -= len(before.reservations)
    if not is_leaving:
        run.fleet.num_reservations += len(node.reservations)
    if before.usable != usable or was_leaving != is_leaving:
        _move_room(run.fleet, before.usable, -1, is_leaving=was_leaving)
        _move_room(run.fleet, usable, 1, is_leaving=is_leaving)
    if node.usable != usable:
        node = node._replace(usable=usable)
    run.fleet.nodes = run.fleet.nodes.set(number, node)
    if number not in run.fleet.short:
        run.fleet.short = (*run.fleet.short, number)
    is_emptied = node.is_kept and not node.reservations and not node.workers
    if is_emptied and number not in run.fleet.emptied:
        run.fleet.emptied = (*run.fleet.emptied, number)


def _move_room(fleet: Fleet, room: int, num: int, *, is_leaving: bool) -> None:
    """Count ``num`` more nodes with ``room`` usable workers."""
    counts = dict(fleet.leaving if is_leaving else fleet.staying)
    counts[room] = counts.get(room, 0) + num
    rooms = tuple(sorted((room, num) for room, num in counts.items() if room and num))
    if is_leaving:
        fleet.leaving = rooms
    else:
        fleet.staying = rooms


def put_worker(transition: Transition, number: int, worker: Worker) -> None:
    """Store a worker and update the counts."""
    put_workers(transition, {number: worker})


def put_workers(transition: Transition, workers: Mapping[int, Worker]) -> None:
    """Store workers and update the counts, of each node once."""
    run = transition.run
    changed: dict[int, None] = {}
    for number, worker in workers.items():
        before = run.fleet.workers[number].status
        if before is not worker.status:
            run.fleet.num_starting += worker.status is WorkerStatus.STARTING
            run.fleet.num_starting -= before is WorkerStatus.STARTING
            changed[worker.node] = None
    run.fleet.workers = run.fleet.workers.update(workers)
    for number in changed:
        put_node(transition, number, run.fleet.nodes[number])


def add_workers(transition: Transition, node_number: int, num: int) -> list[str]:
    """Add starting workers to a node; return their names."""
    run = transition.run
    numbers = range(run.fleet.next_worker, run.fleet.next_worker + num)
    names = [*map(worker_name, numbers)]
    deadline_s = transition.now_s + transition.rules.bounds.start_bound_s(
        run.fleet.num_failed_starts
    )
    begun_s, status = transition.now_s, WorkerStatus.STARTING
    added = (Worker(name, node_number, status, deadline_s, begun_s=begun_s) for name in names)
    run.fleet.workers = run.fleet.workers.update(dict(zip(numbers, added, strict=True)))
    run.fleet.next_worker += num
    run.fleet.num_starting += num
    node = run.fleet.nodes[node_number]
    # A starting worker changes none of its node's counts.
    run.fleet.nodes = run.fleet.nodes.set(
        node_number, node._replace(workers=(*node.workers, *numbers))
    )
    transition.wake_by(deadline_s)
    return names


def leave(transition: Transition, numbers: Collection[int]) -> None:
    """Note that members have left the attempt."""
    attempt = transition.run.attempt
    attempt.inside = attempt.inside.without(*numbers)
    attempt.num_inside -= len(numbers)


def drop_worker(transition: Transition, number: int) -> None:
    """Forget a worker that is gone."""
    run = transition.run
    worker = run.fleet.workers[number]
    run.fleet.workers = run.fleet.workers.without(number)
    unbind(transition, [number])
    if number in run.attempt.inside:
        leave(transition, [number])
    run.fleet.num_starting -= worker.status is WorkerStatus.STARTING
    node = run.fleet.nodes[worker.node]
    rest = tuple(w for w in node.workers if w != number)
    put_node(transition, worker.node, node._replace(workers=rest))


def unbind(transition: Transition, numbers: Iterable[int]) -> bool:
    """Note that workers no longer use reservations; return whether one did."""
    fleet = transition.run.fleet
    bound = [number for number in numbers if number in fleet.bound]
    if bound:
        fleet.bound = fleet.bound.without(*bound)
    return bool(bound)


def kill_worker(transition: Transition, number: int, reason: str) -> None:
    """Kill a worker; if it is a member, it stays inside its attempt until it is gone."""
    kill_workers(transition, [number], reason)


def kill_workers(transition: Transition, numbers: Iterable[int], reason: str) -> None:
    """Kill workers; killing many of one node takes about as long as killing one."""
    deadline_s = transition.now_s + transition.rules.bounds.kill_s
    dying = {
        number: worker._replace(status=WorkerStatus.DYING, deadline_s=deadline_s)
        for number in numbers
        if (worker := transition.run.fleet.workers[number]).status is not WorkerStatus.DYING
    }
    if dying:
        unbind(transition, dying)
        put_workers(transition, dying)
        transition.wake_by(deadline_s)
        names = (worker.name for worker in dying.values())
        transition.actions += (KillWorker(worker=name, reason=reason) for name in names)


def offer(transition: Transition, alternative: int) -> Offer:
    """Return the state of the requests for an alternative of capacity."""
    offers = transition.run.fleet.offers
    return offers[alternative] if alternative < len(offers) else Offer()


def put_offer(transition: Transition, alternative: int, changed: Offer) -> None:
    """Store an offer; without pending requests it neither waits nor is refused."""
    if not changed.num_pending:
        changed = changed._replace(since_s=inf, refused_s=inf)
    offers = transition.run.fleet.offers
    offers += (Offer(),) * (alternative + 1 - len(offers))
    transition.run.fleet.offers = (*offers[:alternative], changed, *offers[alternative + 1 :])


def add_reservations(
    transition: Transition, avoid: tuple[str, ...], alternative: int, num: int
) -> range:
    """Add ``num`` pending reservations; return their numbers."""
    run = transition.run
    first = run.fleet.next_reservation
    numbers = range(first, first + num)
    run.fleet.next_reservation += num
    pending = dict.fromkeys(numbers, Reservation(-1, avoid, alternative))
    run.fleet.reservations = run.fleet.reservations.update(pending)
    run.fleet.num_reservations += num
    asked = offer(transition, alternative)
    since_s = min(asked.since_s, transition.now_s)
    put_offer(
        transition,
        alternative,
        asked._replace(num_pending=asked.num_pending + num, since_s=since_s),
    )
    return numbers


def place_reservation(transition: Transition, number: int, node_number: int) -> None:
    """Note that a pending reservation was granted on a node."""
    run = transition.run
    reservation = run.fleet.reservations[number]
    assert reservation.node < 0, f"reservation {number} is already on node {reservation.node}"
    run.fleet.reservations = run.fleet.reservations.set(
        number, reservation._replace(node=node_number, avoid=())
    )
    run.fleet.num_reservations -= 1
    node = run.fleet.nodes[node_number]
    asked = offer(transition, reservation.alternative)
    put_offer(
        transition,
        reservation.alternative,
        asked._replace(
            num_pending=asked.num_pending - 1,
            num_granted=asked.num_granted + 1,
            # A provider that granted one will grant more: the wait for the rest restarts.
            since_s=transition.now_s,
            refused_s=inf,
            took_s=capacity.took_s(
                asked.took_s,
                transition.rules.capacity,
                since_s=asked.since_s,
                joined_s=node.joined_s,
                now_s=transition.now_s,
            ),
        ),
    )
    if not (node.is_kept and node.reservations):
        # Start the keeper even if one is known: that one may have been ended when it reported.
        transition.actions.append(StartKeeper(node=node.name))
    reservations = tuple(sorted((*node.reservations, number)))
    put_node(transition, node_number, node._replace(reservations=reservations, is_kept=True))


def end_needless_keepers(transition: Transition) -> None:
    """End the keepers of nodes where the run has no worker or reservation left.

    Call it when storage, or the protected memory of the current attempt's nodes, has a version of
    this attempt: those keepers hold only older ones. While a process of ours is on a machine, Ray
    does not count the machine as idle and does not return it.
    """
    fleet = transition.run.fleet
    if not fleet.emptied:
        return
    used, kept, ended = dict(transition.run.attempt.placed), list[int](), dict[int, Node]()
    for number in fleet.emptied:
        node = fleet.nodes[number]
        if node.reservations or node.workers:
            continue
        if not node.alive or number in used:
            # A lost node and its keeper may come back. A node of the current attempt may hold the
            # newest version, although its member has left.
            kept.append(number)
            continue
        ended[number] = node._replace(is_kept=False, keeper_by_s=inf, budget_bytes=0)
        transition.actions.append(EndKeeper(node=node.name))
    fleet.emptied, fleet.nodes = tuple(kept), fleet.nodes.update(ended)


def drop_pending(transition: Transition, numbers: Sequence[int]) -> None:
    """Forget pending reservations; forgetting many takes about as long as forgetting one."""
    run = transition.run
    counts = Counter(run.fleet.reservations[number].alternative for number in numbers)
    run.fleet.reservations = run.fleet.reservations.without(*numbers)
    run.fleet.num_reservations -= len(numbers)
    for alternative, num in counts.items():
        asked = offer(transition, alternative)
        put_offer(transition, alternative, asked._replace(num_pending=asked.num_pending - num))


def drop_reservations(transition: Transition, numbers: Iterable[int]) -> None:
    """Forget reservations, many of one node in the time of one; their workers then have none."""
    by_node: dict[int, list[int]] = {}
    for number in numbers:
        by_node.setdefault(transition.run.fleet.reservations[number].node, []).append(number)
    for node, group in by_node.items():
        if node < 0:
            drop_pending(transition, group)
        else:
            _drop_granted(transition, node, group)


def _drop_granted(transition: Transition, node_number: int, numbers: Collection[int]) -> None:
    """Forget reservations that were granted on a node."""
    fleet = transition.run.fleet
    counts = Counter(fleet.reservations[number].alternative for number in numbers)
    fleet.reservations = fleet.reservations.without(*numbers)
    for alternative, num in counts.items():
        asked = offer(transition, alternative)
        put_offer(transition, alternative, asked._replace(num_granted=asked.num_granted - num))
    node = fleet.nodes[node_number]
    unbind(transition, [each for each in node.workers if fleet.bound.get(each) in numbers])
    rest = tuple(number for number in node.reservations if number not in numbers)
    put_node(transition, node_number, node._replace(reservations=rest))


def alternative_of(transition: Transition, node: int) -> int:
    """Return the alternative of capacity that a node belongs to; the worst if it has several."""
    fleet = transition.run.fleet
    if len(fleet.offers) <= 1:
        return 0
    reservations = fleet.nodes[node].reservations
    return max(
        (fleet.reservations[reservation].alternative for reservation in reservations), default=0
    )


def free_reservations(transition: Transition, node: Node) -> list[int]:
    """Return the reservations of a node that no worker uses, ascending."""
    used = [transition.run.fleet.bound.get(worker) for worker in node.workers]
    return [reservation for reservation in node.reservations if reservation not in used]


def strike(transition: Transition, number: int, *, is_certain: bool = False) -> None:
    """Note a proven failure of a worker on a node, and avoid the node if it stands out.

    If ``is_certain`` that the node will fail again, avoid it at once. Otherwise compare it with the
    best other node: if all fail alike, they share a cause, and avoiding them would only leave
    healthy nodes idle. After it was avoided, a node is on trial: without that, a broken one would
    end an attempt every few minutes.
    """
    rules = transition.rules.avoid
    node = transition.run.fleet.nodes[number]
    oldest_s = transition.now_s - rules.window_s
    strikes = (*(at_s for at_s in node.strikes if at_s > oldest_s), transition.now_s)
    fewest = inf
    for other in transition.run.fleet.nodes.values():
        if other.alive and not other.draining and other.name != node.name:
            fewest = min(fewest, sum(at_s > oldest_s for at_s in other.strikes))
            if fewest == 0:
                break
    is_avoided = transition.now_s < node.avoid_until_s
    on_trial = not is_avoided and transition.now_s < node.avoid_until_s + node.avoided_s
    num_max = fewest + (1 if on_trial else rules.strikes_max)
    node = node._replace(strikes=strikes)
    if is_certain or len(strikes) >= num_max:
        avoid_s = node.avoided_s if is_avoided else rules.avoid_s
        if on_trial:
            avoid_s = min(2 * node.avoided_s, rules.avoid_s_max)
        until_s = max(node.avoid_until_s, transition.now_s + avoid_s)
        node = node._replace(avoid_until_s=until_s, avoided_s=avoid_s)
        transition.wake_by(until_s)
    put_node(transition, number, node)


def revive_node(transition: Transition, number: int) -> None:
    """Note that a node is in the cluster and not draining."""
    node = transition.run.fleet.nodes[number]
    if node.alive and node.is_slow:
        return  # a restarted controller gets this report again
    joined_s = node.joined_s if node.alive else transition.now_s
    revived = node._replace(alive=True, leave_by_s=inf, joined_s=joined_s, slow=Slow())
    put_node(transition, number, revived)
    # The link to the controller pauses, longer each time a node is lost and found again.
    ends = (CONTROLLER, node.name)
    search.note(transition, (), heard=ends, asked=(ends,))
