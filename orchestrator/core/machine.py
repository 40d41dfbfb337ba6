"""The run controller as a pure function: ``(state, event) -> (state, actions)``.

``step`` is the only way a run's state changes. It reads no clock, does no I/O and draws no
random numbers. So a run replays exactly from its journal, and hundreds of fault histories can be
simulated per second (``tests.simulation``).
"""

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
    """Fold one event into the run; return the run after it and the actions, in order.

    Total: every event is legal in every phase. An event of another attempt than the current one is
    stale and changes nothing; an event that comes twice changes nothing the second time. If nothing
    changed, the same state object returns, so that the shell need not journal the event. The rules
    must be the same at every call.
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
