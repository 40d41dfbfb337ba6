"""Statistics of a run from its journal: incidents, goodput, lost steps, time by phase.

Pure. Status, ``summary.json``, the report and the Prometheus exporter read these numbers, so they
agree everywhere, live and in a replay.

A step counts as completed once rank 0 has completed it and has written its line of metrics.
``StepCompleted`` reports it about once a second, and each worker reports its last step when it
leaves. If rank 0 died, the step of the survivor that got furthest counts; it may be one off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from orchestrator.core.log.incident import Incident, incident_folder, suspicion
from orchestrator.core.log.suspected import busy, in_few_lines
from orchestrator.core.log.time_parts import TimeParts
from orchestrator.core.state import Table, worker_name, worker_number
from orchestrator.diagnosis import Suspicion
from orchestrator.policies import cost_share
from ucp_core.layout import ParallelLayout

_HOUR_S = 3600.0
_SUSPICIONS_KEPT = 100
#: Phases in which members train.
_TRAINING = frozenset({"training", "yielding"})
#: Points of a curve over the whole run. Beyond twice this many, the older ones are thinned.
_POINTS_KEPT = 500


@dataclass(slots=True, kw_only=True)
class RunStats:
    """Numbers of a run so far. ``add`` takes the records of the journal in order."""

    began_at: float = 0.0  #: Wall time of the first record; 0.0 if it has none.
    attempt: int = 0
    step: int = 0  #: Last completed step that need not be redone.
    layout: str = ""  #: Layout of the newest attempt, for people.
    num_workers: int = 0
    #: Oldest first. The last ones may still change.
    incidents: list[Incident] = field(default_factory=list)
    #: Bytes that the newest attempt loaded, by kind of source.
    loaded: dict[str, int] = field(default_factory=dict)
    #: Versions in storage that were skipped when the newest attempt's version was chosen, each with
    #: the reason.
    passed_over: tuple[str, ...] = ()
    lost_steps: int = 0  #: Completed steps that had to be redone.
    phase: str = "waiting"  #: waiting, forming, training, yielding, recovering or over.
    #: ``(phase, from_s, to_s)`` of every phase that has ended.
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    #: Requests for reservations so far, by alternative of capacity.
    asked: dict[str, int] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)
    #: Requests that counted as refused; they stay open.
    refused: dict[str, int] = field(default_factory=dict)
    suspicions: dict[str, int] = field(default_factory=dict)  #: How many there were, by kind.
    #: Cost of the run's reservations so far; 0.0 without a known price.
    cost_usd: float = 0.0
    #: ``(at_s, step)`` of completed steps, redone ones too; older ones are thinned.
    progress: list[tuple[float, int]] = field(default_factory=list)
    #: ``(at_s, workers)`` at each change of the number of workers that train.
    sizes: list[tuple[float, int]] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)  #: Nodes that are gone and did not return.
    outcome: str = ""  #: Outcome of ``FinishRun``, "" before.
    reason: str = ""  #: Reason of ``FinishRun``, "" before.
    #: ``(alternative, dollars an hour)`` of requested and of granted reservations.
    _pending: Table[tuple[str, float]] = field(default_factory=Table)
    _held: Table[tuple[str, float]] = field(default_factory=Table)
    #: Granted reservations by price. The price is text, as a key in JSON must be.
    _prices: dict[str, int] = field(default_factory=dict)
    #: Current suspicions, and the newest ones of the run, oldest first.
    _suspects: list[Suspicion] = field(default_factory=list)
    _suspected_last: list[Suspicion] = field(default_factory=list)
    _began_s: float | None = None
    _now_s: float = 0.0
    _phase_since_s: float = 0.0
    #: Indices of the incidents that may still change.
    _open: list[int] = field(default_factory=list)
    _injected_s: list[float] = field(default_factory=list)
    #: Duration of the last step that was reported.
    _step_s: float = 0.0
    _time: TimeParts = field(default_factory=TimeParts)
    #: Whether the run has trained since a person started or resumed it.
    _has_trained: bool = False
    #: Members of the newest attempt that have not formed. The values mean nothing.
    _unformed: dict[str, bool] = field(default_factory=dict)
    _first_rank: str = ""
    #: Node and numbers of the members of the newest attempt, in rank order.
    _placed: list[tuple[str, list[int]]] = field(default_factory=list)
    #: Last steps of the newest attempt, by reports of members that left: of rank 0, and of any
    #: member.
    _said_by_first: int | None = None
    _said_step: int = 0
    _skipped: list[str] = field(default_factory=list)
    _unusable: tuple[str, ...] = ()
    #: The attempt whose evidence was collected; 0 after its incident is reported.
    _evidence_of: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the next record of the journal."""
        at_s = float(record["at_s"])
        if self._began_s is None:
            self._began_s = self._phase_since_s = at_s
            self.began_at = float(record.get("wall_time", 0.0))
            self._time.begin(at_s)
            self._now_s = at_s
        if record["kind"] == "RunResumed":
            # The previous record is the run's last sign of life.
            self._enter("over", self._now_s)
        # The reservations between that sign of life and the resume are unknown.
        if self._prices and at_s > self._now_s and record["kind"] != "RunResumed":
            self.cost_usd += (at_s - self._now_s) * self.usd_per_hour / _HOUR_S
        self._now_s = max(self._now_s, at_s)
        take = self._TAKES.get(record["kind"])
        if take is not None:
            take(self, record, at_s)

    @property
    def wall_s(self) -> float:
        """Return the time from the first record to the last one."""
        return 0.0 if self._began_s is None else self._now_s - self._began_s

    @property
    def began_s(self) -> float:
        """Return the instant of the first record; 0.0 before it."""
        return self._began_s or 0.0

    @property
    def phase_since_s(self) -> float:
        """Return when the current phase began."""
        return self._phase_since_s

    @property
    def startup_s(self) -> float:
        """Return the time until the run first trained; all of it if it never did."""
        spans = (*self.spans, (self.phase, self._phase_since_s, self._now_s))
        began_s = next((from_s for phase, from_s, _ in spans if phase == "training"), self._now_s)
        return 0.0 if self._began_s is None else began_s - self._began_s

    @property
    def goodput(self) -> float:
        """Return the share of the wall time that went into steps that count."""
        return self.parts_s["steps"] / self.wall_s if self.wall_s else 0.0

    @property
    def goodput_since_start(self) -> float:
        """Return ``goodput`` without idle time and the time of starts by a person."""
        parts_s = self.parts_s
        trains_s = sum(parts_s.values()) - parts_s["start"] - parts_s["idle"]
        return parts_s["steps"] / trains_s if trains_s > 0.0 else 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """Return where the time went; the parts (``PARTS``) add up to ``wall_s``."""
        part = "steps" if self.phase in _TRAINING else self._waits_for
        return self._time.parts_s(part, self._now_s)

    @property
    def _waits_for(self) -> str:
        if self.phase == "over":
            return "idle"
        return "recovery" if self._has_trained else "start"

    @property
    def phases_s(self) -> dict[str, float]:
        """Return the time spent in each phase, the current one up to the last record."""
        totals: dict[str, float] = {}
        present = (self.phase, self._phase_since_s, self._now_s)
        for phase, from_s, to_s in (*self.spans, present):
            if phase != "over":
                totals[phase] = totals.get(phase, 0.0) + to_s - from_s
        return totals

    @property
    def usd_per_hour(self) -> float:
        """Return the price per hour of the granted reservations."""
        return sum(num * float(price) for price, num in self._prices.items())

    @property
    def num_pending(self) -> int:
        """Return how many reservations are requested and not granted."""
        return len(self._pending)

    def usd_per_million_tokens(self, tokens_per_step: int) -> float | None:
        """Return the cost of a million trained tokens; None without a price or a trained token."""
        tokens = self.step * tokens_per_step
        return 1e6 * self.cost_usd / tokens if tokens and self.cost_usd else None

    @property
    def suspected(self) -> list[tuple[float, str]]:
        """Return ``(since_s, sentence)`` of the newest suspicions, summarized."""
        return in_few_lines(self._suspected_last)

    def busy(self, at_s: float) -> str:
        """Return a line that machines are busy if suspicions change ranks; otherwise ""."""
        return busy(self._suspected_last, at_s)

    def summary(self) -> dict[str, Any]:
        """Return the journal's part of ``summary.json``."""
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "steps": self.step,
            "attempts": self.attempt,
            "lost_steps": self.lost_steps,
            "goodput": self.goodput,
            "goodput_since_start": self.goodput_since_start,
            "parts_s": self.parts_s,
            "wall_s": self.wall_s,
            "startup_s": self.startup_s,
            "phases_s": self.phases_s,
            "cost_usd": self.cost_usd,
            "suspicions": self.suspicions,
            "suspected": [{"since_s": at, "evidence": text} for at, text in self.suspected],
            "incidents": [incident.to_json() for incident in self.incidents],
        }

    @property
    def evidence(self) -> str:
        """Return the folder of the last evidence, below the run directory; "" if there is none."""
        return next((each.folder for each in reversed(self.incidents) if each.folder), "")

    def is_open(self, incident: Incident) -> bool:
        """Return whether ``incident`` may still change."""
        return any(incident is one for one in self._open_incidents())

    @property
    def num_settled(self) -> int:
        """Return how many incidents, from the first on, are final."""
        return min(self._open, default=len(self.incidents))

    def _open_incidents(self) -> list[Incident]:
        return [self.incidents[index] for index in self._open]

    def _settle(self) -> None:
        """Close the incidents after which a step was completed."""
        self._open = [i for i in self._open if self.incidents[i].t_first_step_s is None]

    def _enter(self, phase: str, at_s: float) -> None:
        if phase != "training":
            self._settle()
        num_workers = self.num_workers if phase in ("training", "yielding") else 0
        if num_workers != (self.sizes[-1][1] if self.sizes else 0):
            _keep(self.sizes, (at_s, num_workers))
        if phase != self.phase:
            self._divide_time(phase)
            self.spans.append((self.phase, self._phase_since_s, at_s))
            self.phase, self._phase_since_s = phase, at_s

    def _divide_time(self, next_phase: str) -> None:
        """Count the time of the phase that ends."""
        if self.phase not in _TRAINING:
            self._time.spend(self._waits_for, self._now_s)
        elif next_phase not in _TRAINING:
            is_cut_off = (self.phase, next_phase) == ("training", "recovering")
            self._time.leave_training("recovery" if is_cut_off else "saving", self._now_s)
        self._has_trained |= next_phase in _TRAINING

    def _fault_injected(self, _record: Mapping[str, Any], at_s: float) -> None:
        self._injected_s.append(at_s)

    def _controller_started(self, record: Mapping[str, Any], at_s: float) -> None:
        if record["incarnation"] > 1 and not self.outcome:
            self._begin_incident(
                Incident(
                    kind="controller_restart",
                    evidence=f"incarnation {record['incarnation']} of the controller began",
                    attempt=self.attempt,
                    layout_before=self.layout,
                    layout_after=self.layout,
                    t_detect_s=at_s,
                )
            )

    def _resumed(self, record: Mapping[str, Any], at_s: float) -> None:
        """Continue counting. Open incidents are final now, although no step followed them."""
        self.outcome = self.reason = ""
        self._open.clear()
        self._pending = Table()
        self._give_back_all()
        self._injected_s.clear()
        self.lost_nodes.clear()
        self._enter("recovering", at_s)
        self._has_trained = False
        self._begin_incident(
            Incident(
                kind="resume",
                evidence=record["why"],
                attempt=record["attempt"],
                layout_before=self.layout,
                t_detect_s=at_s,
                t_fence_s=at_s,
            )
        )
        self.incidents[-1].is_start = True

    def _begin_incident(self, incident: Incident) -> None:
        detected_s = incident.t_detect_s
        trains = self.phase == "training" or any(span[0] == "training" for span in self.spans)
        incident.is_start = not trains
        for index, injected_s in enumerate(self._injected_s):
            if detected_s is None or injected_s <= detected_s:
                incident.t_fault_s = injected_s
                del self._injected_s[index]
                break
        self._open.append(len(self.incidents))
        self.incidents.append(incident)
        incident.number = len(self.incidents)

    def _incident_reported(self, record: Mapping[str, Any], _at_s: float) -> None:
        kind = record["incident"]
        last = self.incidents[self._open[-1]] if self._open else None
        if last is None or kind != "controller_restart" or last.kind != kind:
            self._begin_incident(
                Incident(kind=kind, layout_before=self.layout, t_detect_s=record["found_s"])
            )
            last = self.incidents[-1]
        last.guilty = tuple(record["guilty"])
        last.evidence = record["evidence"]
        last.attempt = record["attempt"]
        last.layout_after = ""
        last.t_fence_s = record["fenced_s"]
        last.rule, last.verdict = record.get("rule", ""), record.get("verdict", "")
        guilty = set(map(worker_number, last.guilty))
        members = ((node, number) for node, numbers in self._placed for number in numbers)
        last.places = tuple(map(tuple, record.get("places", ()))) or tuple(
            (rank, worker_name(number), node)
            for rank, (node, number) in enumerate(members if guilty else ())
            if number in guilty
        )
        last.killed = tuple(map(tuple, record.get("killed", ())))
        last.suspects = tuple(self._suspects)
        if self._evidence_of == last.attempt:
            # The evidence belongs to the first incident of an attempt, which says why it ended.
            last.folder, self._evidence_of = incident_folder(last.number), 0
        if kind == "unloadable":
            last.skipped = tuple(self._skipped)
        # No later step ends a requested stop or a skipped update.
        if kind in ("stop", "not_finite"):
            self._open.pop()

    def _evidence_collected(self, record: Mapping[str, Any], _at_s: float) -> None:
        self._evidence_of = record["attempt"]

    def _recovering(self, _record: Mapping[str, Any], at_s: float) -> None:
        self._enter("recovering", at_s)

    def _yielding(self, _record: Mapping[str, Any], at_s: float) -> None:
        self._enter("yielding", at_s)

    def _attempt_started(self, record: Mapping[str, Any], at_s: float) -> None:
        self._enter("forming", at_s)
        self.loaded = {}
        self._suspects.clear()
        self.passed_over, self._unusable = self._unusable, ()
        self._skipped = []
        self.attempt = record["attempt"]
        self.layout = str(ParallelLayout.from_json(dict(record["layout"])))
        self._placed = [(node, workers) for node, workers, _ in placed(record)]
        numbers = chain.from_iterable(workers for _, workers in self._placed)
        self._unformed = dict.fromkeys(map(worker_name, numbers), True)
        self.num_workers, self._first_rank = len(self._unformed), next(iter(self._unformed))
        num_lost = self._resume(record["resume_step"])
        self.lost_steps += num_lost
        for incident in self._open_incidents():
            incident.t_decide_s = at_s if incident.t_fence_s is not None else None
            incident.layout_after = self.layout
            incident.other_layouts = tuple(map(tuple, record.get("other_layouts", ())))
            incident.skipped += self.passed_over
        if self._open:
            self.incidents[self._open[-1]].lost_steps += num_lost

    def _resume(self, resume_step: int) -> int:
        """Go to the step that the next attempt resumes from; return how many steps are lost."""
        reached_step = self._reached_step
        self._time.lose(resume_step)
        self._count(resume_step)
        self.step = resume_step
        self._said_by_first, self._said_step = None, 0
        return max(reached_step - resume_step, 0)

    @property
    def _reached_step(self) -> int:
        said_step = self._said_step if self._said_by_first is None else self._said_by_first
        return max(self.step, said_step)

    def _worker_formed(self, record: Mapping[str, Any], at_s: float) -> None:
        if record["attempt"] != self.attempt:
            return
        for worker in _workers(record):
            self._unformed.pop(worker, None)
        self._note_skipped(record)
        sources = record.get("sources", ())
        _add(self.loaded, sources)
        for incident in self._open_incidents():
            if incident.t_decide_s is None:
                continue
            first_step_s = incident.t_first_step_s
            incident.t_load_s = at_s if first_step_s is None else min(at_s, first_step_s)
            incident.t_reform_s = incident.t_load_s - record.get("load_s", 0.0)
            _add(incident.sources, sources)
        if not self._unformed:
            self._enter("training", at_s)
            self._settle()

    def _step_completed(self, record: Mapping[str, Any], at_s: float) -> None:
        step = record["step"]
        if record["attempt"] != self.attempt or step <= self.step:
            return
        self._said_step = max(self._said_step, step)
        if self.phase == "recovering":
            return
        if self.phase in ("forming", "waiting"):
            self._enter("training", at_s)
        self._settle()
        for incident in self._open_incidents():
            incident.t_first_step_s = at_s
            lost_s = incident.lost_steps * self._step_s
            # Reservations cost money while training waits and while steps are redone.
            waited_s = sum(s for phase, s in incident.phases_s.items() if phase != "yield")
            incident.cost_usd = (waited_s + lost_s) * self.usd_per_hour / _HOUR_S
        # If steps are short, a member may report after the first step that it has formed.
        if not self._unformed:
            self._settle()
        self._step_s = record.get("step_s", self._step_s)
        self._count(step)

    def _count(self, step: int) -> None:
        """Count all steps up to this one."""
        if step <= self.step:
            return
        _keep(self.progress, (self._now_s, step))
        is_training = self.phase in _TRAINING
        self._time.count(self.step + 1, step, self._now_s, is_training=is_training)
        self.step = step

    def _saves_measured(self, record: Mapping[str, Any], _at_s: float) -> None:
        costs = record["costs"]
        stalls_s = costs["snapshot_stall_s"], costs["checkpoint_stall_s"]
        every = costs["pace"]["snapshot_steps"], costs["pace"]["checkpoint_steps"]
        by_steps = cost_share(costs["step_s"], *stalls_s, steps=every)
        self._time.saving_share = by_steps / (1.0 + by_steps)

    def _suspected(self, record: Mapping[str, Any], _at_s: float) -> None:
        before = {(one.kind, one.guilty) for one in self._suspects}
        self._suspects = [*map(suspicion, record["suspects"])]
        for one in self._suspects:
            if (one.kind, one.guilty) not in before:
                _add(self.suspicions, [(str(one.kind), 1)])
                self._suspected_last.append(one)
        del self._suspected_last[:-_SUSPICIONS_KEPT]

    def _worker_left(self, record: Mapping[str, Any], at_s: float) -> None:
        if record["attempt"] == self.attempt:
            self._note_skipped(record)
            self._note_last(_workers(record), record["step"])
        # The last step of an attempt may be complete before it was reported.
        if record["how"] in ("completed", "yielded"):
            self._step_completed(record, at_s)

    def _worker_raised(self, record: Mapping[str, Any], _at_s: float) -> None:
        if record["attempt"] == self.attempt:
            # The record names the step that was under way.
            self._note_last(_workers(record), record["step"] - 1)

    def _note_last(self, workers: Collection[str], step: int) -> None:
        self._said_step = max(self._said_step, step)
        if self._first_rank in workers:
            self._said_by_first = step

    def _note_skipped(self, record: Mapping[str, Any]) -> None:
        lines = tuple(record.get("skipped", ()))
        self._skipped += lines
        for incident in self._open_incidents():
            incident.skipped += lines

    def _committed_read(self, record: Mapping[str, Any], _at_s: float) -> None:
        # Every rank had completed the committed step, even if no controller saw it then.
        self._said_step = max(self._said_step, record["step"])
        # A version in memory is newer than those that were skipped in storage.
        self._unusable = () if record.get("source") == "memory" else tuple(record["skipped"])

    def _reservation_requested(self, record: Mapping[str, Any], _at_s: float) -> None:
        alternative, numbers = str(record.get("alternative", 0)), _numbers(record)
        _add(self.asked, [(alternative, len(numbers))])
        price = float(record.get("usd_per_hour", 0.0))
        self._pending = self._pending.update(dict.fromkeys(numbers, (alternative, price)))

    def _reservation_granted(self, record: Mapping[str, Any], _at_s: float) -> None:
        self._hold({record["reservation"]})

    def _node_lost(self, record: Mapping[str, Any], _at_s: float) -> None:
        self._node_joined(record, _at_s)
        self.lost_nodes.append(record["node"])

    def _node_joined(self, record: Mapping[str, Any], _at_s: float) -> None:
        self.lost_nodes = [node for node in self.lost_nodes if node != record["node"]]

    def _surveyed(self, record: Mapping[str, Any], _at_s: float) -> None:
        self._hold({reservation for reservation, _ in record["reservations"]})

    def _hold(self, numbers: Collection[int]) -> None:
        for number in numbers:
            reservation = self._pending.get(number)
            if reservation is None:
                continue
            self._pending = self._pending.without(number)
            self._held = self._held.set(number, reservation)
            alternative, price = reservation
            _add(self._prices, [(str(price), 1)])
            _add(self.granted, [(alternative, 1)])

    def _reservation_released(self, record: Mapping[str, Any], _at_s: float) -> None:
        numbers = _numbers(record)
        pending = [number for number in numbers if number in self._pending]
        if pending:
            self._pending = self._pending.without(*pending)
        for number in numbers:
            held = self._held.get(number)
            if held is not None:
                self._held = self._held.without(number)
                price = str(held[1])
                self._prices[price] -= 1
                if not self._prices[price]:
                    del self._prices[price]

    def _give_back_all(self) -> None:
        self._held, self._prices = Table(), {}

    def _reservations_refused(self, record: Mapping[str, Any], _at_s: float) -> None:
        _add(self.refused, [(str(record["alternative"]), record["num_reservations"])])

    def _finished(self, record: Mapping[str, Any], at_s: float) -> None:
        # Members may have reported more steps when they left than ``StepCompleted`` did.
        self._count(self._reached_step)
        self._enter("over", at_s)
        self._give_back_all()
        self.outcome, self.reason = record["outcome"], record["reason"]

    _TAKES: ClassVar[dict[str, Callable[[RunStats, Mapping[str, Any], float], None]]] = {
        "FaultInjected": _fault_injected,
        "ControllerStarted": _controller_started,
        "RunResumed": _resumed,
        "ReportIncident": _incident_reported,
        "CollectEvidence": _evidence_collected,
        "RequestReservation": _reservation_requested,
        "ReleaseReservation": _reservation_released,
        "ReservationGranted": _reservation_granted,
        "WorkersSurveyed": _surveyed,
        "NoteRefused": _reservations_refused,
        "NodeJoined": _node_joined,
        "NodeLost": _node_lost,
        "FenceAttempt": _recovering,
        "ReadCommitted": _recovering,
        "YieldAttempt": _yielding,
        "StartAttempt": _attempt_started,
        "Suspected": _suspected,
        "WorkerFormed": _worker_formed,
        "StepCompleted": _step_completed,
        "SavesMeasured": _saves_measured,
        "WorkerLeft": _worker_left,
        "WorkerRaised": _worker_raised,
        "CommittedRead": _committed_read,
        "FinishRun": _finished,
    }


def _keep(points: list[tuple[float, int]], point: tuple[float, int]) -> None:
    """Append a point; if there are too many, drop every second one of the older half."""
    points.append(point)
    if len(points) > 2 * _POINTS_KEPT:
        del points[1:_POINTS_KEPT:2]


def _add(sums: dict[str, int], sources: Iterable[tuple[str, int]]) -> None:
    for source, num_bytes in sources:
        sums[source] = sums.get(source, 0) + num_bytes


def placed(start: Mapping[str, Any]) -> list[Any]:
    """Return ``StartAttempt.placed`` as a record has it; an older record names each member."""
    by_node: dict[str, list[Any]] = {}
    for worker, node, reservation in start.get("members", ()):
        _, workers, reservations = by_node.setdefault(node, [node, [], []])
        workers.append(worker_number(worker))
        reservations.append(reservation)
    return [*by_node.values()] or start["placed"]


def _numbers(record: Mapping[str, Any]) -> range:
    """Return the reservations of a record: one, or several consecutive ones."""
    first = record["reservation"]
    return range(first, first + record.get("num", 1))


def _workers(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the workers of an event, which may hold for several."""
    return (record["worker"], *record.get("others", ()))
