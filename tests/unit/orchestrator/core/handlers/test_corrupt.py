"""A machine that computes something wrong: the run leaves it and goes back behind it."""

from typing import Any

from orchestrator.core import Phase, RunRules, RunState, resume_event, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.actions import (
    FenceAttempt,
    FinishRun,
    KillWorker,
    ReadCommitted,
    ReportIncident,
    RequestReservation,
    StartAttempt,
)
from tests.simulation.checkers import check
from tests.support.run_events import begun_on, formed_by

RULES = RunRules(run="r", min_workers=1, max_workers=3, total_steps=100)
WORKERS = ("w0001", "w0002", "w0003")


class History:
    """Three workers on three nodes that have trained ten steps, and stored some of them."""

    def __init__(self, *stored: int, nodes: str = "abc") -> None:
        self.state, self.actions = RunState(), list[act.Action]()
        for event in (*begun_on(nodes), *formed_by(WORKERS, at_s=2.0)):
            self.send(event)
        for number in range(1, 10):
            self.send(ev.StepCompleted(at_s=2.0 + number, attempt=1, step=number, step_s=1.0))
            if number in stored:
                self.send(ev.CheckpointCommitted(at_s=2.0 + number, attempt=1, step=number))

    def send(self, event: ev.Event) -> None:
        self.state, actions = step(self.state, event, rules=RULES)
        self.actions += actions

    def raised(self, *ranks: int, sound_step: int) -> None:
        """Let all ranks say which of them err; then those leave that are not killed."""
        for worker in WORKERS:
            self.send(
                ev.WorkerRaised(
                    at_s=12.0, attempt=1, worker=worker, step=10,
                    error="workers.errors.CorruptError: step 10: it errs", traceback="",
                    ranks=ranks, sound_step=sound_step,
                )
            )  # fmt: skip
        # Events that were on their way when the ranks raised.
        self.send(ev.CheckpointCommitted(at_s=12.0, attempt=1, step=9))
        for action in self.of(KillWorker):
            exited = ev.WorkerExited(at_s=12.5, worker=action.worker, cause="crash", detail="")
            self.send(exited)

    def read(self, found: int) -> None:
        """Let storage answer, as often as it is asked."""
        while self.state.phase is Phase.READING:
            asked = self.of(ReadCommitted)[-1]
            self.send(
                ev.CommittedRead(
                at_s=13.0, attempt=1, step=found, committed_by=1 if found else 0, skipped=(),
                number=asked.number, source="storage" if found else "", stored=found,
                )
            )  # fmt: skip

    def of(self, kind: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]


def test_the_machine_is_left_and_nothing_behind_the_last_check_counts() -> None:
    """Its later results are in every later version, also in one that is committed late."""
    history = History(4, 8)
    history.raised(1, sound_step=5)

    assert [one.worker for one in history.of(KillWorker)] == ["w0002"]
    assert history.of(ReadCommitted)[-1].lineage == ((1, 0), (2, 5))
    history.read(4)
    first, second = history.of(StartAttempt)
    assert (second.resume_step, second.resume_attempt) == (4, 1)
    assert {node for _, node, _ in second.members} == {"a", "c"}
    assert history.of(RequestReservation)[-1].avoid == ("b",)
    (incident,) = history.of(ReportIncident)
    assert (incident.incident, incident.guilty) == ("corrupt", ("w0002",))
    assert first.lineage == ((1, 0),)


def test_a_controller_that_dies_before_the_next_attempt_goes_back_all_the_same() -> None:
    """No attempt has trained from there, so nothing else says it."""
    history = History(4, 8)
    history.raised(1, sound_step=5)

    resumed = resume_event(history.state, at_s=20.0, incarnation=2)
    assert (2, 5) in resumed.lineage
    assert resumed.stored <= 5


def test_if_it_is_not_known_which_erred_all_stay_and_the_run_goes_back() -> None:
    """One of two that differ is healthy."""
    history = History(4, 8)
    history.raised(0, 1, 2, sound_step=5)
    history.read(4)

    assert not history.of(KillWorker)
    assert len(history.of(StartAttempt)[-1].members) == len(WORKERS)
    (incident,) = history.of(ReportIncident)
    assert (incident.incident, incident.guilty) == ("corrupt", ())


def test_without_a_version_before_the_last_check_it_starts_over() -> None:
    """Step 8 was stored, and no check has passed before it: it is no step to hold on to."""
    history = History(8)
    history.raised(1, sound_step=0)
    history.read(0)

    assert not history.of(FinishRun)
    assert history.of(StartAttempt)[-1].resume_step == 0


def test_only_the_worker_that_errs_is_left_on_the_only_node() -> None:
    """Without the others there would be no run, and their devices are well."""
    history = History(4, nodes="aaa")
    history.raised(2, sound_step=5)
    history.read(4)

    assert [one.worker for one in history.of(KillWorker)] == ["w0003"]
    last = history.of(StartAttempt)[-1]
    assert {worker for worker, _, _ in last.members} == {"w0001", "w0002"}


def test_each_attempt_is_in_the_history_once_after_the_run_went_back() -> None:
    """Seen: the step that it went back to stood there beside the attempt that began behind it."""
    history = History(4, 8)
    history.raised(1, sound_step=5)
    resumed = resume_event(history.state, at_s=20.0, incarnation=2)
    history.read(4)
    check(history.state)
    assert history.of(StartAttempt)[-1].lineage == ((1, 0), (2, 4))

    history.send(resumed)
    check(history.state)


def test_a_machine_that_erred_is_left_though_its_process_is_gone() -> None:
    """Seen: the name of the process was looked up among the living, and the controller died."""
    history = History(4, 8)
    history.send(ev.WorkerExited(at_s=12.0, worker="w0002", cause="crash", detail=""))
    history.raised(1, sound_step=5)
    history.read(4)

    crash, corrupt = history.of(ReportIncident)
    assert (crash.incident, crash.guilty) == ("crash", ("w0002",))
    assert (corrupt.incident, corrupt.places) == ("corrupt", ((1, "w0002", "b"),))
    assert {node for _, node, _ in history.of(StartAttempt)[-1].members} == {"a", "c"}
    assert history.of(ReadCommitted)[-1].lineage == ((1, 0), (2, 5))


def test_an_error_that_was_found_while_the_controller_was_away_is_heard_after_it() -> None:
    """Seen: members that had left counted as heard, and the machine that errs trained on."""
    history = History(4, 8)
    history.send(ev.ControllerStarted(at_s=11.0, incarnation=2))
    history.send(
        ev.WorkersSurveyed(
            at_s=11.1,
            alive=tuple(zip(WORKERS, "abc", (0, 0, 0), strict=True)),
            reservations=((1, "a"), (2, "b"), (3, "c")),
            pending_reservations=(),
        )
    )
    assert history.of(FenceAttempt)[-1].workers == WORKERS

    history.raised(1, sound_step=5)
    history.read(4)

    last = history.of(StartAttempt)[-1]
    assert (last.resume_step, {node for _, node, _ in last.members}) == (4, {"a", "c"})
    (incident,) = history.of(ReportIncident)
    assert (incident.incident, incident.guilty) == ("corrupt", ("w0002",))
