"""The run controller as a pure function: (state, event) -> (state, actions).

``step`` is the only way a run's state changes. It reads no clock, does no I/O and draws no
random numbers. So a run replays exactly from its journal, and hundreds of fault histories can be
simulated per second (``orchestrator.simulation``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.actions import Action
from orchestrator.core.handlers import deadlines as on_time
from orchestrator.core.handlers import (
    demand,
    link_events,
    pace,
    planned,
    protection,
    resume,
    sharing,
    survey,
)
from orchestrator.core.handlers import fleet_events as on_fleet
from orchestrator.core.handlers import member_events as on_members
from orchestrator.core.rules import RunRules
from orchestrator.core.state import TERMINAL, RunState, freeze, next_deadline_s, thaw
from orchestrator.core.transition import Transition

#: One handler per kind of event; a test compares the keys with ``ev.Event``.
_HANDLERS: dict[type, Callable[[Transition, Any], None]] = {
    ev.ControllerStarted: survey.controller_started,
    ev.RunResumed: resume.run_resumed,
    ev.WorkersSurveyed: survey.surveyed,
    ev.NodeJoined: on_fleet.node_joined,
    ev.NodeLost: on_fleet.node_lost,
    ev.NodeDraining: on_fleet.node_draining,
    ev.ControllerDraining: on_fleet.controller_draining,
    ev.KeeperReady: on_fleet.keeper_ready,
    ev.KeeperDied: on_fleet.keeper_died,
    ev.KeeperSilent: on_fleet.keeper_silent,
    ev.OthersSeen: sharing.others_seen,
    ev.ReservationGranted: on_fleet.reservation_granted,
    ev.CapacityRefused: demand.capacity_refused,
    ev.WorkerReady: on_fleet.worker_ready,
    ev.WorkerExited: on_fleet.worker_exited,
    ev.WorkerFormed: on_members.worker_formed,
    ev.StepCompleted: on_members.step_completed,
    ev.CheckpointCommitted: on_members.checkpoint_committed,
    ev.WorkerLeft: on_members.worker_left,
    ev.WorkerRaised: on_members.worker_raised,
    ev.NotFiniteFound: on_members.not_finite_found,
    ev.HangFound: on_members.hang_found,
    ev.AttemptStalled: on_members.attempt_stalled,
    ev.MembersAtWork: on_members.members_at_work,
    ev.LinksProbed: link_events.links_probed,
    ev.CommittedRead: on_members.committed_read,
    ev.MemoryMeasured: protection.memory_measured,
    ev.MemoryProtected: protection.memory_protected,
    ev.SavesMeasured: pace.saves_measured,
    ev.StopRequested: on_time.stop_requested,
    ev.FaultInjected: on_time.fault_injected,
    ev.Ticked: on_time.ticked,
}


def step(
    state: RunState, event: ev.Event, *, rules: RunRules
) -> tuple[RunState, tuple[Action, ...]]:
    """Fold one event into the run.

    Total: every event is legal in every phase. An event of another attempt than the current one
    is stale and changes nothing; an event that comes twice changes nothing the second time.

    Args:
        state: The run before the event.
        event: What happened.
        rules: Of the run; the same at every call.

    Returns:
        The run after the event, and the actions to perform, in order. The very same state object
        if the event changed nothing, so that the shell need not journal it.
    """
    if state.phase in TERMINAL and not isinstance(event, ev.ControllerStarted | ev.RunResumed):
        return state, ()
    if isinstance(event, ev.Ticked) and event.at_s < next_deadline_s(state):
        return state, ()
    transition = Transition(thaw(state), rules, event.at_s)
    _HANDLERS[type(event)](transition, event)
    if transition.run.phase not in TERMINAL:
        demand.settle(transition)
        planned.consider(transition)
    after = freeze(transition.run)
    if not transition.actions and after == state:
        return state, ()
    return after, tuple(transition.actions)
