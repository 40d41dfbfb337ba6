from dataclasses import FrozenInstanceError

import pytest

from orchestrator.core import RunState
from orchestrator.core.state import MutableRunState, freeze, thaw, worker_number


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
