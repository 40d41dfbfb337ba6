"""The invariants of every run state, whatever happened."""

from math import inf, isinf
from operator import attrgetter, is_

from orchestrator.core.state import ACTIVE, Phase, RunState, WorkerStatus, worker_name
from orchestrator.policies import rooms_of

#: Phases that end by themselves or at their bound.
_BOUNDED = frozenset({Phase.WAITING, Phase.FORMING, Phase.YIELDING, Phase.FENCING, Phase.READING})


#: All that the fleet's invariants are about.
_FLEET = attrgetter(
    "fleet.workers",
    "fleet.reservations",
    "fleet.nodes",
    "fleet.node_ids",
    "fleet.offers",
    "fleet.num_reservations",
    "fleet.staying",
    "fleet.leaving",
    "fleet.num_starting",
    "fleet.next_worker",
)


def check(state: RunState, passed: RunState | None = None) -> None:
    """Assert every invariant of ``state``; costs the size of the fleet.

    Args:
        state: To check.
        passed: One that held: a fleet that is still the very same is not looked at again.
    """
    _check_attempt(state)
    limit, is_begun = state.sharing.limit, bool(state.attempt.members)
    assert limit < 0 or not is_begun or limit > 0, f"{limit} workers are left to a run that trains"
    if passed is None or not all(map(is_, _FLEET(state), _FLEET(passed))):
        _check_workers(state)
        _check_nodes(state)


def _check_attempt(state: RunState) -> None:
    attempts = [attempt for attempt, _ in state.lineage]
    # A resume leaves out earlier ones that trained nothing.
    last = [attempt for attempt in attempts if attempt > state.trained]
    assert last == list(range(state.trained + 1, state.attempt.number + 1)), (
        f"attempts {attempts} are not consecutive behind {state.trained}"
    )
    assert attempts == sorted(set(attempts)), f"attempts {attempts} are not in order"
    if state.phase in _BOUNDED and state.attempt.number:
        assert not isinf(state.deadline_s), f"{state.phase} has no bound"
    assert 0 <= state.reads.pending <= state.reads.num, f"reads_pending={state.reads.pending}"
    inside = list(state.attempt.inside)
    assert len(inside) == state.attempt.num_inside, (
        f"num_inside={state.attempt.num_inside}, inside={inside}"
    )
    living = {member for member in state.attempt.members if member in state.fleet.workers}
    assert set(inside) <= living, f"{inside} are inside and no living members"
    if state.phase in (Phase.FORMING, Phase.TRAINING):
        assert state.attempt.num_inside == len(state.attempt.members), (
            f"{state.phase} without all members"
        )
        unformed = sum(not formed for formed in state.attempt.inside.values())
        assert unformed == state.attempt.num_unformed, (
            f"num_unformed={state.attempt.num_unformed} of {unformed}"
        )
        assert state.attempt.layout is not None
        assert state.attempt.layout.world_size == len(state.attempt.members)
        refused = [each for each in state.refused if each.rules_out(state.attempt.layout)]
        assert not refused, f"{state.attempt.layout} was refused: {refused}"
        tp, nodes = state.attempt.layout.tp, state.attempt.nodes
        groups = [set(nodes[first : first + tp]) for first in range(0, len(nodes), tp)]
        assert all(len(group) == 1 for group in groups), f"tp={tp} over nodes {nodes}"
    if state.phase in ACTIVE:
        for member in inside:
            worker = state.fleet.workers[member]
            assert worker.status is WorkerStatus.READY, f"{worker} trains in {state.phase}"
            assert member in state.fleet.bound, f"{worker} trains without a reservation"
    if state.phase in (Phase.WAITING, Phase.READING):
        assert not inside, f"{inside} are inside in {state.phase}"


def _check_workers(state: RunState) -> None:
    used: dict[int, str] = {}
    for number, worker in state.fleet.workers.items():
        assert worker.name == worker_name(number), f"{worker.name} is kept as {number}"
        assert number in state.fleet.nodes[worker.node].workers, f"{worker.name} is not on its node"
        assert number < state.fleet.next_worker, f"{worker.name} was never started"
        reservation = state.fleet.bound.get(number)
        if reservation is not None:
            assert reservation not in used, f"{worker.name}, {used[reservation]}: one reservation"
            used[reservation] = worker.name
            assert state.fleet.reservations[reservation].node == worker.node, (
                f"{worker.name}: reservation elsewhere"
            )
    assert len(used) == len(state.fleet.bound), "a worker that is gone has a reservation"
    starting = [worker.status for worker in state.fleet.workers.values()].count(
        WorkerStatus.STARTING
    )
    assert starting == state.fleet.num_starting, (
        f"num_starting={state.fleet.num_starting} of {starting}"
    )


def _check_nodes(state: RunState) -> None:
    rooms: dict[bool, list[int]] = {False: [], True: []}
    placed = 0
    num_pending = sum([reservation.node < 0 for reservation in state.fleet.reservations.values()])
    num_reservations = num_pending
    for number, node in state.fleet.nodes.items():
        placed += len(node.reservations)
        assert state.fleet.node_ids[node.name] == number
        assert node.alive or not (node.reservations or node.workers), (
            f"lost {node} has reservations or workers"
        )
        for reservation in node.reservations:
            assert state.fleet.reservations[reservation].node == number, (
                f"reservation {reservation} is not on {node.name}"
            )
        ready = [state.fleet.workers[w].status for w in node.workers].count(WorkerStatus.READY)
        expected = min(len(node.reservations), ready)
        assert node.usable == expected, f"{node.name}: usable={node.usable} of {expected}"
        rooms[node.draining].append(expected)
        if not node.draining:
            num_reservations += len(node.reservations)
    assert placed == len(state.fleet.reservations) - num_pending, "a reservation is on no node"
    for alternative, offer in enumerate(state.fleet.offers):
        reservations = [
            s for s in state.fleet.reservations.values() if s.alternative == alternative
        ]
        asked = sum([reservation.node < 0 for reservation in reservations])
        assert (offer.num_pending, offer.num_granted) == (asked, len(reservations) - asked), (
            f"{offer}"
        )
        assert asked or offer.since_s == offer.refused_s == inf, f"{offer} asks for nothing"
    assert (rooms_of(rooms[False]), rooms_of(rooms[True]), num_reservations) == (
        state.fleet.staying,
        state.fleet.leaving,
        state.fleet.num_reservations,
    ), "the fleet's counts are wrong"
