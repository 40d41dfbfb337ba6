from dataclasses import FrozenInstanceError

import pytest

from orchestrator.core import RunState
from orchestrator.core.state import (
    Attempt,
    Fleet,
    MutableRunState,
    Node,
    Table,
    Worker,
    WorkerStatus,
    describe,
    freeze,
    thaw,
    worker_number,
)


def test_a_state_cannot_be_changed() -> None:
    """The journal, the status page and the simulator hold on to states."""
    state = RunState()

    for part, name in ((state, "phase"), (state.attempt, "step"), (state.fleet, "reservations")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, getattr(part, name))


def test_a_mutable_copy_does_not_reach_the_state_it_came_from() -> None:
    """Freezing retypes it in place, so it must be a copy from the start."""
    state = RunState()
    run = thaw(state)
    run.attempt.number, run.reads.num, run.fleet.next_reservation = 7, 8, 9
    after = freeze(run)

    assert (state.attempt.number, state.reads.num, state.fleet.next_reservation) == (0, 0, 1)
    assert (after.attempt.number, after.reads.num, after.fleet.next_reservation) == (7, 8, 9)
    assert type(after) is RunState
    assert after != state


def test_a_new_state_equals_an_untouched_copy() -> None:
    """``machine.step`` recognises an event without effect by this comparison."""
    assert thaw(RunState()) == RunState()
    assert freeze(MutableRunState()) == RunState()


def test_only_names_of_the_machine_have_a_number() -> None:
    """Events come from outside; a foreign name must be unknown and not raise."""
    assert worker_number("w0007") == 7
    assert worker_number("w12345") == 12345
    for name in ("", "w", "x0007", "w-1", "w1.5", "worker"):
        assert worker_number(name) == -1


def test_nodes_in_trouble_are_described_and_all_are_counted() -> None:
    """A document with a row for each of 80,000 workers had 16 MB, once a second."""
    workers = {
        number: Worker(name=f"w{number:04d}", node=number, status=WorkerStatus.READY)
        for number in range(6)
    }
    nodes = [Node(name=f"n{number}", alive=number != 6) for number in range(7)]
    nodes[2] = nodes[2]._replace(leave_by_s=100.0)
    workers[7] = Worker(name="w0007", node=4, status=WorkerStatus.STARTING)
    state = RunState(
        attempt=Attempt(
            number=1,
            members=tuple(range(6)),
            placed=tuple((number, (number,)) for number in range(6)),
            inside=Table.of((number, number != 4) for number in range(6)),
        ),
        fleet=Fleet(
            workers=Table.of(workers.items()),
            bound=Table.of((number, number + 1) for number in range(6)),
            nodes=Table.of(enumerate(nodes)),
        ),
    )
    document = describe(state, num_nodes=3)

    assert [row["node"] for row in document["nodes"]] == ["n4", "n2", "n0"]
    assert [row["rank"] for row in document["members"]] == [0, 2, 4]
    assert [row["worker"] for row in document["standbys"]] == ["w0007"]
    assert document["processes"] == {"training": 5, "forming": 1, "starting": 1}
    assert (document["num_members"], document["num_standbys"]) == (6, 1)
    assert [row["node"] for row in describe(state, num_nodes=9)["nodes"]][-1] == "n6"
    assert len(describe(state)["members"]) == 6
