from dataclasses import FrozenInstanceError

import pytest

from orchestrator.core import Phase, RunState
from orchestrator.core.state.run import Draft, freeze, thaw, worker_number


def test_a_state_cannot_be_changed() -> None:
    """The journal, the status page and the simulator hold on to states."""
    state = RunState()

    with pytest.raises(FrozenInstanceError):
        state.phase = Phase.RUNNING


def test_a_draft_does_not_reach_the_state_it_came_from() -> None:
    """Freezing retypes the draft in place, so it must be a copy from the start."""
    state = RunState()
    draft = thaw(state)
    draft.attempt = 7
    after = freeze(draft)

    assert state.attempt == 0
    assert after.attempt == 7
    assert type(after) is RunState
    assert after != state


def test_a_new_state_equals_an_untouched_draft() -> None:
    """``machine.step`` recognises an event without effect by this comparison."""
    assert thaw(RunState()) == RunState()
    assert freeze(Draft()) == RunState()


def test_only_names_of_the_machine_have_a_number() -> None:
    """Events come from outside; a foreign name must be unknown and not raise."""
    assert worker_number("w0007") == 7
    assert worker_number("w12345") == 12345
    for name in ("", "w", "x0007", "w-1", "w1.5", "worker"):
        assert worker_number(name) == -1
