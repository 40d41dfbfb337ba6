"""The run controller as a pure function: (state, event) -> (state, actions).

``step`` is the only way a run's state changes. It reads no clock, does no I/O and draws no
random numbers. So a run replays exactly from its journal, and hundreds of fault histories can be
simulated per second (``tests.simulation``).
"""

from __future__ import annotations

from orchestrator.core import events as ev
from orchestrator.core.actions import Action
from orchestrator.core.consequences import EventFolded
from orchestrator.core.phase_table import TABLE
from orchestrator.core.rules import RunRules
from orchestrator.core.state import TERMINAL, RunState, freeze, next_deadline_s, thaw
from orchestrator.core.transition import Transition


def step(
    state: RunState, event: ev.Event, *, rules: RunRules
) -> tuple[RunState, tuple[Action, ...]]:
    """Fold one event into the run.

    Total: every event is legal in every phase. An event of another attempt than the current one
    is stale and changes nothing; an event that comes twice changes nothing the second time.

    Args:
        rules: Rules of the run; the same at every call.

    Returns:
        The run after the event, and the actions to perform, in order. The very same state object
        if the event changed nothing, so that the shell need not journal it.
    """
    if state.phase in TERMINAL and state.phase not in TABLE[type(event)]:
        return state, ()
    if isinstance(event, ev.Ticked) and event.at_s < next_deadline_s(state):
        return state, ()
    transition = Transition(thaw(state), rules, event.at_s, TABLE)
    transition.follow(event)
    transition.follow(EventFolded())
    after = freeze(transition.run)
    if not transition.actions and after == state:
        return state, ()
    return after, tuple(transition.actions)
