"""The table of events and consequences by phase: ``TABLE[type][phase]`` is the handler.

``machine.step`` looks an event up here and ``Transition.follow`` a consequence.
``orchestrator/DESIGN.md`` shows the table, and a test compares the two.
"""

from orchestrator.core import consequences as co
from orchestrator.core import events as ev
from orchestrator.core.handlers import deadlines as on_time
from orchestrator.core.handlers import (
    demand,
    formation,
    pace,
    planned,
    protection,
    recovery,
    resume,
    sharing,
    survey,
)
from orchestrator.core.handlers import fleet_events as on_fleet
from orchestrator.core.handlers import member_events as on_members
from orchestrator.core.network import search, timing
from orchestrator.core.state import ACTIVE, TERMINAL, Phase
from orchestrator.core.transition import Handler

#: Handlers by phase. In a phase without one, nothing happens.
Row = dict[Phase, Handler]


_GROUPS = {"active": ACTIVE, "over": TERMINAL}


def row(every: Handler | None = None, **named: Handler) -> Row:
    """Return a row of the table; the most specific entry wins.

    Args:
        every: Handler in all phases but FINISHED and FAILED.
        **named: Handlers by phase. ``active`` covers FORMING, TRAINING and YIELDING; ``over``
            covers FINISHED and FAILED.
    """
    found = {} if every is None else dict.fromkeys(set(Phase) - TERMINAL, every)
    for name in sorted(named, key=lambda name: name not in _GROUPS):
        found |= dict.fromkeys(_GROUPS.get(name) or {Phase(name)}, named[name])
    return found


TABLE: dict[type, Row] = {
    # The controller and the user
    ev.ControllerStarted: row(survey.controller_started, over=survey.finish_again),
    ev.RunResumed: row(resume.run_resumed, over=resume.run_resumed),
    ev.WorkersSurveyed: row(
        waiting=survey.surveyed_waiting,
        forming=survey.surveyed_forming,
        training=survey.surveyed_training,
        yielding=survey.surveyed_yielding,
        fencing=survey.surveyed_fencing,
        reading=survey.surveyed_reading,
    ),
    ev.ControllerDraining: row(on_fleet.controller_draining),
    ev.StopRequested: row(
        on_time.stop_requested,
        waiting=on_time.stop_requested_waiting,
        forming=on_time.stop_requested_forming,
    ),
    ev.WorkersSet: row(on_time.workers_set),
    ev.SaveRequested: row(on_time.save_requested),
    ev.FaultInjected: row(on_time.fault_injected),
    ev.Ticked: row(on_time.ticked),
    # Nodes, their keepers, and other runs
    ev.NodeJoined: row(on_fleet.node_joined),
    ev.NodeLost: row(on_fleet.node_lost),
    ev.NodeDraining: row(on_fleet.node_draining),
    ev.KeeperReady: row(on_fleet.keeper_ready),
    ev.KeeperDied: row(on_fleet.keeper_died, waiting=on_fleet.keeper_died_waiting),
    ev.KeeperSilent: row(on_fleet.keeper_silent),
    ev.OthersSeen: row(sharing.others_seen),
    ev.LinksProbed: row(search.links_probed),
    ev.LinksTimed: row(timing.links_timed),
    ev.TrafficMeasured: row(timing.traffic_measured),
    ev.MemoryMeasured: row(protection.memory_measured, active=protection.memory_measured_training),
    ev.MemoryProtected: row(active=protection.memory_protected),
    # Capacity and processes
    ev.ReservationGranted: row(on_fleet.reservation_granted),
    ev.CapacityRefused: row(demand.capacity_refused),
    ev.StartsAdvanced: row(on_fleet.starts_advanced),
    ev.WorkerReady: row(on_fleet.worker_ready),
    ev.WorkerExited: row(on_fleet.worker_exited),
    # Members of the attempt
    ev.WorkerFormed: row(
        on_members.worker_formed,
        waiting=recovery.heard_late_waiting,
        forming=on_members.worker_formed_forming,
        reading=recovery.heard_late,
    ),
    ev.StepCompleted: row(
        active=on_members.step_completed,
        forming=on_members.step_completed_forming,
        fencing=on_members.step_completed_fencing,
    ),
    ev.CheckpointCommitted: row(
        on_members.checkpoint_committed, active=on_members.checkpoint_committed_training
    ),
    ev.WorkerLeft: row(
        active=on_members.worker_left,
        waiting=recovery.heard_late_waiting,
        yielding=on_members.worker_left_yielding,
        fencing=on_members.worker_left_fencing,
        reading=recovery.heard_late,
    ),
    ev.WorkerRaised: row(active=on_members.worker_raised, fencing=on_members.worker_raised),
    ev.NotFiniteFound: row(on_members.not_finite_found),
    ev.HangFound: row(active=on_members.hang_found, fencing=on_members.hang_found_fencing),
    ev.Suspected: row(active=on_members.suspected, fencing=on_members.suspected),
    ev.AttemptStalled: row(
        training=on_members.attempt_stalled, yielding=on_members.attempt_stalled
    ),
    ev.MembersAtWork: row(fencing=on_members.members_at_work),
    ev.SavesMeasured: row(active=pace.saves_measured),
    ev.CommittedRead: row(
        waiting=recovery.late_read,
        fencing=recovery.committed_read,
        reading=recovery.committed_read,
    ),
    # Consequences
    co.AttemptFailed: row(
        active=recovery.begin_fence, fencing=recovery.add_to_cause, reading=recovery.add_to_cause
    ),
    co.IdleLoss: row(
        waiting=recovery.report_loss, fencing=recovery.add_loss, reading=recovery.add_loss
    ),
    co.MemoryLost: row(
        waiting=recovery.memory_lost_waiting,
        fencing=recovery.memory_lost,
        reading=recovery.memory_lost,
    ),
    co.RecoveryAdvanced: row(
        fencing=recovery.read_once_all_left, reading=recovery.decide_once_read
    ),
    co.CapacityChanged: row(waiting=formation.capacity_changed),
    co.ReachChanged: row(demand.reach_changed, waiting=formation.reach_changed_waiting),
    co.LinksDue: row(waiting=formation.links_due),
    co.SearchAnswered: row(
        search.answered_down, active=search.answered_training, forming=search.answered_forming
    ),
    co.KeepersOutdated: row(active=protection.order_keepers),
    co.BoundReached: row(
        waiting=formation.wait_bound,
        forming=recovery.form_bound,
        yielding=recovery.yield_bound,
        fencing=recovery.fence_bound,
        reading=recovery.read_bound,
    ),
    co.EventFolded: row(
        demand.settle,
        waiting=demand.settle_waiting,
        training=planned.settle_and_consider,
        yielding=demand.settle_training,
    ),
}
