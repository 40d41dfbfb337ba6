"""Keepers' reports on an attempt that stands still, judged by the production detector."""

from dataclasses import dataclass, field

from orchestrator.core import events as ev
from orchestrator.detection import Detector, Hang, at_work, judge, limits_from, observe
from tests.simulation.world import STEP_S, SimAttempt, SimCluster, SimWorker
from workers.protocol import GroupState, NodeReport, WorkerPhase, WorkerReport

#: How a worker hangs whose process shows it.
SHOWN = ("stopped", "frozen")
#: How a worker pauses that is well: with the interpreter's lock, or a debugger's hold on it, too.
PAUSES = ("computes", "computes", "sleeps", "holds", "traced")
#: Period of the reports.
_LOOK_S = 0.2
#: After this the collectives of those that wait fail, which is not simulated.
_COLLECTIVES_FAIL_S = 300.0
#: The limits in ordinary steps.
_LIMITS = limits_from(STEP_S, step_s_p50=STEP_S)


@dataclass
class Watching:
    """One incarnation of the controller, as far as it watches.

    Attributes:
        detector: The detector's memory of reports.
        judged: The last attempt that it found to hang.
        told: The workers that it reported at work in a fenced attempt.
    """

    incarnation: int
    detector: Detector = field(default_factory=Detector)
    judged: int = 0
    told: tuple[str, ...] = ()


def watch(cluster: SimCluster) -> None:
    """Report and judge until no worker is hung or pauses; a second call changes nothing."""
    if not cluster.is_watched:
        cluster.is_watched = True
        cluster.at(_LOOK_S, _look, cluster, Watching(cluster.incarnation))


def _look(cluster: SimCluster, watching: Watching) -> None:
    now_s = cluster.now_s
    if not any(each.hung or each.busy_until_s > now_s for each in cluster.workers.values()):
        cluster.is_watched = False
        return
    if watching.incarnation != cluster.incarnation:
        watching = Watching(cluster.incarnation)
    newest = cluster.attempts.get(cluster.monitor.attempt)
    if newest is not None and cluster.controller_up:
        for report in _reports(cluster, newest):
            watching.detector = observe(watching.detector, report, now_s)
        verdict = judge(
            watching.detector,
            now_s,
            attempt=newest.number,
            members=tuple(newest.members),
            limits=_LIMITS,
            collectives_fail_s=_COLLECTIVES_FAIL_S,
        )
        if isinstance(verdict, Hang) and watching.judged != newest.number:
            watching.judged = newest.number
            cluster.find(
                ev.HangFound,
                attempt=newest.number,
                guilty=verdict.guilty,
                evidence=verdict.evidence,
                rule=verdict.rule,
                verdict=str(verdict.kind),
            )
        _look_who_leaves(cluster, watching, newest)
    cluster.at(_LOOK_S, _look, cluster, watching)


def _look_who_leaves(cluster: SimCluster, watching: Watching, newest: SimAttempt) -> None:
    late_at_s = newest.fenced_s + cluster.rules.bounds.fence_s / 2
    if cluster.now_s < late_at_s:
        watching.told = ()
        return
    told = at_work(watching.detector, attempt=newest.number, members=newest.members)
    if told != watching.told:
        watching.told = told
        cluster.find(ev.MembersAtWork, attempt=newest.number, workers=told)


def _reports(cluster: SimCluster, newest: SimAttempt) -> list[NodeReport]:
    """Return a report of each node that is heard and has a member.

    Keepers that are away are a fault of their own: here they report.
    """
    rows: dict[str, list[WorkerReport]] = {}
    for rank, name in enumerate(newest.members):
        worker = cluster.workers.get(name)
        if worker is not None and worker.alive and not worker.node.cut_off:
            row = report_of(worker, rank, newest, cluster.now_s)
            rows.setdefault(worker.node.name, []).append(row)
    return [NodeReport(node=node, seq=0, workers=tuple(each)) for node, each in rows.items()]


def report_of(worker: SimWorker, rank: int, newest: SimAttempt, now_s: float) -> WorkerReport:
    """Return what a keeper sees of a member."""
    silent_s = now_s - worker.hung_at_s if worker.hung and worker.hung_as in SHOWN else 0.0
    is_busy = worker.busy_until_s > now_s
    is_away = silent_s > 0.0 or is_busy
    does_not_beat = is_busy and worker.busy_as in {"holds", "traced"}
    letter = "T" if silent_s and worker.hung_as == "stopped" else "S"
    is_inside = worker.attempt == newest.number
    world = GroupState(
        group="world",
        ranks=range(len(newest.members)),
        entered_seq=newest.step + (not is_away),
        finished_seq=newest.step,
        op="all_reduce",
        size_bytes=1,
        waiting_s=0.0 if is_away else _LOOK_S,
    )
    return WorkerReport(
        worker=worker.name,
        pid=1,
        os_state="t" if is_busy and not silent_s and worker.busy_as == "traced" else letter,
        attempt=worker.attempt,
        rank=rank if is_inside else -1,
        phase=WorkerPhase.FORWARD if worker.formed else WorkerPhase.FORMING,
        step=newest.step if is_inside else worker.completed,
        micro_batch=0,
        moved_bytes=0,
        phase_s=silent_s,
        beat_age_s=silent_s or (now_s - worker.busy_at_s if does_not_beat else 0.0),
        processor_s=now_s if worker.busy_as == "computes" and not silent_s else 0.0,
        step_s=STEP_S if is_inside and newest.step > newest.begun_step else 0.0,
        loss=1.0,
        # The beating thread of a frozen process does not run.
        beater_runs=1 if silent_s else 1 + round(10 * now_s),
        groups=(world,) if is_inside and worker.formed else (),
    )
