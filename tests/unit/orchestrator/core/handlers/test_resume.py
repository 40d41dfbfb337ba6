import json
from dataclasses import replace

import pytest

from orchestrator.core import (
    Folded,
    Phase,
    RunRules,
    RunState,
    RunStats,
    fold_on,
    go_back,
    resume_event,
    resume_without_journal,
    starts,
    step,
    transition_records,
    verify,
)
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from workers.protocol import stored_source

RULES = RunRules(run="test", min_workers=1, max_workers=1, total_steps=10)
STOPPED: tuple[ev.Event, ...] = (
    ev.ControllerStarted(at_s=0.0, incarnation=1),
    ev.ReservationGranted(at_s=0.5, reservation=1, node="a"),
    ev.WorkerReady(at_s=1.0, worker="w0001", node="a", pid=11),
    ev.WorkerFormed(at_s=1.5, attempt=1, worker="w0001"),
    ev.StepCompleted(at_s=2.0, attempt=1, step=1, step_s=0.5),
    ev.StopRequested(at_s=2.1, reason="everstep stop"),
    ev.WorkerLeft(at_s=2.6, attempt=1, worker="w0001", how=ev.Leaving.YIELDED, step=2, detail=""),
)


def _went_on(incarnation: int) -> tuple[ev.Event, ...]:
    """Return what happens when the run goes on with new processes, and completes a step."""
    return (
        ev.CommittedRead(at_s=3.0, attempt=1, step=2, committed_by=1, skipped=(), number=1),
        ev.ReservationGranted(at_s=3.5, reservation=incarnation, node="b"),
        ev.WorkerReady(at_s=4.0, worker=f"w{incarnation:04d}", node="b", pid=12),
        ev.WorkerFormed(at_s=4.5, attempt=2, worker=f"w{incarnation:04d}"),
        ev.StepCompleted(at_s=5.0, attempt=2, step=3, step_s=0.5),
    )


def _journal(
    state: RunState, events: tuple[ev.Event, ...], rules: RunRules, *, seq: int
) -> tuple[RunState, list[act.Action], bytes]:
    actions: list[act.Action] = []
    lines = b""
    for event in events:
        state, ordered = step(state, event, rules=rules)
        actions += ordered
        for record in transition_records(event, ordered, attempt=state.attempt.number):
            lines += json.dumps({**record, "seq": seq, "wall_time": 1.0}).encode() + b"\n"
            seq += 1
    return state, actions, lines


ENDED, _, FIRST = _journal(RunState(), STOPPED, RULES, seq=0)
RESUMED = resume_event(ENDED, at_s=2.7, incarnation=2)


def test_a_stopped_run_goes_on_behind_its_last_committed_step() -> None:
    """Steps and numbers of attempts, workers and reservations do not restart."""
    assert ENDED.phase is Phase.FINISHED
    state, actions, _ = _journal(RunState(), (RESUMED, *_went_on(2)), RULES, seq=0)

    (start,) = (action for action in actions if isinstance(action, act.StartAttempt))
    assert (start.attempt, start.resume_step, start.resume_attempt) == (2, 2, 1)
    assert start.lineage == ((1, 0), (2, 2))
    assert start.members == (("w0002", "b", 2),)
    assert not any(isinstance(action, act.ReportIncident) for action in actions)
    assert (state.phase, state.attempt.step, state.stop_reason) == (Phase.TRAINING, 3, "")
    assert "everstep stop" in RESUMED.why


def test_a_run_without_a_journal_goes_on_behind_what_storage_has() -> None:
    """A script that ran alone left it. None of its attempts' numbers is given again."""
    event = resume_without_journal(4, 2, at_s=2.7, incarnation=1)
    read, granted, ready, formed, completed = _went_on(1)
    assert isinstance(read, ev.CommittedRead)
    assert isinstance(formed, ev.WorkerFormed)
    assert isinstance(completed, ev.StepCompleted)
    events = (
        event,
        replace(read, attempt=4),
        granted,
        ready,
        replace(formed, attempt=5),
        replace(completed, attempt=5),
    )
    state, actions, _ = _journal(RunState(), events, RULES, seq=0)

    (start,) = (action for action in actions if isinstance(action, act.StartAttempt))
    assert (start.attempt, start.resume_step, start.resume_attempt) == (5, 2, 1)
    assert start.lineage == ((5, 2),)
    assert (state.phase, state.attempt.step) == (Phase.TRAINING, 3)


def test_a_run_without_a_journal_does_not_fall_behind_what_storage_had() -> None:
    """All manifests are gone, the data is there: somebody may bring them back."""
    event = resume_without_journal(4, 40, at_s=2.7, incarnation=1)
    read = ev.CommittedRead(
        at_s=3.0, attempt=4, step=0, committed_by=0, skipped=(), number=1, lost=(40, 30), stored=0
    )
    failed, actions, _ = _journal(RunState(), (event, read), RULES, seq=0)

    assert failed.phase is Phase.FAILED
    assert "(step-00000040, step-00000030)" in failed.reason
    assert not any(isinstance(action, act.StartAttempt) for action in actions)


def test_a_resume_waits_for_missing_workers_as_at_the_first_start() -> None:
    """The first of two workers to be ready again must not begin alone at once."""
    rules = replace(RULES, max_workers=2)
    state, _, _ = _journal(RunState(), (RESUMED, *_went_on(2)[:3]), rules, seq=0)

    assert state.phase is Phase.WAITING
    late = ev.Ticked(at_s=4.0 + rules.bounds.grace_s)
    assert step(state, late, rules=rules)[0].phase is Phase.FORMING


def test_a_failed_run_has_its_budgets_back() -> None:
    """The bug that ended it is mended: the first error after that is no repetition."""
    raised = ev.WorkerRaised(
        at_s=2.0, attempt=1, worker="w0001", step=2, error="ValueError: x", traceback="Traceback"
    )
    read = ev.CommittedRead(at_s=2.1, attempt=1, step=1, committed_by=1, skipped=(), number=1)
    rules = replace(RULES, budgets=replace(RULES.budgets, user_max=0))
    failed, _, _ = _journal(RunState(), (*STOPPED[:5], raised, read), rules, seq=0)
    assert failed.phase is Phase.FAILED, failed
    event = resume_event(failed, at_s=2.7, incarnation=2)
    state, _, _ = _journal(RunState(), (event,), rules, seq=0)

    assert (state.phase, state.faults, state.raised_before) == (Phase.READING, (), ())
    assert event.why.startswith("it failed: ")


def test_a_run_whose_committed_steps_are_all_lost_fails_until_a_person_has_chosen() -> None:
    """From step 0 it would train over what may be brought back, for days, unasked.

    A restored version has the name of the bad one, so after that nothing is left out.
    """
    event = replace(RESUMED, bad=(stored_source(20, 1),))
    read = ev.CommittedRead(
        at_s=3.0, attempt=1, step=0, committed_by=0, skipped=(), number=1, lost=(20, 10)
    )
    failed, actions, second = _journal(RunState(), (event, read), RULES, seq=FIRST.count(b"\n"))
    again = resume_event(failed, at_s=3.7, incarnation=3)

    assert failed.phase is Phase.FAILED
    assert "(step-00000020, step-00000010)" in failed.reason
    assert not any(isinstance(action, act.StartAttempt) for action in actions)
    assert again.bad == ()
    assert verify([second], RULES)[0] == failed


@pytest.mark.parametrize(
    ("stored", "damaged", "phase"),
    [
        (0, (), Phase.FAILED),
        (2, (), Phase.FAILED),
        (2, (4,), Phase.WAITING),
        (4, (), Phase.WAITING),
    ],
    ids=["all_gone", "newest_gone", "newest_damaged", "there"],
)
def test_a_run_does_not_fall_behind_what_it_committed(
    stored: int, damaged: tuple[int, ...], phase: Phase
) -> None:
    """Seen: what was chosen had been deleted meanwhile, and 4,070 steps were redone from step 0."""
    event = replace(RESUMED, stored=4)
    read = ev.CommittedRead(
        at_s=3.0,
        attempt=1,
        step=stored,
        committed_by=1 if stored else 0,
        skipped=(),
        number=1,
        source="storage" if stored else "",
        stored=stored,
        damaged=damaged,
    )
    state, _, _ = _journal(RunState(), (event, read), RULES, seq=FIRST.count(b"\n"))

    assert state.phase is phase
    if phase is Phase.FAILED:
        assert "step 4 was committed" in state.reason
        assert "name another run.directory" in state.reason
    known = 4 if phase is Phase.FAILED else stored
    assert resume_event(state, at_s=3.7, incarnation=3).stored == known


def test_a_resume_waits_for_silent_storage_while_memory_is_behind_it() -> None:
    """A keeper holds an older step than the one that is committed, and storage answers later."""
    event = replace(RESUMED, stored=4)
    held = ev.CommittedRead(
        at_s=3.0, attempt=1, step=3, committed_by=1, skipped=(), number=1, source="memory"
    )
    read = replace(held, at_s=3.5, step=4, number=2, source="storage", stored=4)
    ticked = ev.Ticked(at_s=3.0 + RULES.bounds.read_s)
    waiting, _, _ = _journal(RunState(), (event, held), RULES, seq=FIRST.count(b"\n"))
    asked, actions, _ = _journal(waiting, (ticked,), RULES, seq=0)
    state, _, _ = _journal(asked, (replace(read, at_s=ticked.at_s + 0.1),), RULES, seq=0)

    assert waiting.phase is Phase.READING
    assert any(isinstance(action, act.ReadCommitted) for action in actions)
    assert state.phase is Phase.WAITING
    assert state.committed == (4, 1)


def test_each_opening_is_replayed_under_its_own_settings() -> None:
    """The journal of a run with other settings than those of today leads nowhere under these."""
    wider = replace(RULES, max_workers=2, min_workers=2)
    num_records = FIRST.count(b"\n")
    state, _, second = _journal(RunState(), (RESUMED, *_went_on(2)[:3]), wider, seq=num_records)
    segments = [FIRST, second, b'{"v": 1, "se']

    assert starts(segments) == [0, 1]
    assert fold_on(Folded(), segments, wider).state == state
    assert verify(segments[:1], RULES)[0] == ENDED
    assert verify(segments[1:], wider)[0] == state


def test_the_numbers_go_on_and_nothing_stays_open() -> None:
    """A report of a run that was stopped for a night must not call the night a recovery."""
    _, _, second = _journal(RunState(), (RESUMED, *_went_on(2)), RULES, seq=0)
    stats = RunStats()
    for line in (FIRST + second).splitlines():
        stats.add(json.loads(line))

    stop, resume = stats.incidents
    assert (stop.kind, resume.kind) == ("stop", "resume")
    assert (resume.t_detect_s, resume.t_first_step_s) == (2.7, 5.0)
    assert not stats.is_open(stop)
    assert not stats.is_open(resume)
    assert (stats.outcome, stats.step, stats.attempt, stats.lost_steps) == ("", 3, 2, 0)


def test_a_start_that_trained_nothing_makes_no_newer_version_count_less() -> None:
    """The version it should have loaded was unreadable that day; it is the newest again.

    The start's versions in storage show that it trained, though no step was reported.
    """
    older = ev.CommittedRead(
        at_s=3.0, attempt=1, step=1, committed_by=1, skipped=(), number=1, stored=1, damaged=(2,)
    )
    events = (RESUMED, older, *_went_on(2)[1:4], ev.StopRequested(at_s=4.7, reason="a slip"))
    left, actions, _ = _journal(RunState(), events, RULES, seq=0)
    (start,) = (action for action in actions if isinstance(action, act.StartAttempt))
    assert start.lineage == ((1, 0), (2, 1))

    again = resume_event(left, at_s=5.0, incarnation=3)
    assert (again.lineage, again.attempt) == (((1, 0),), 2)
    heard = resume_event(left, at_s=5.0, incarnation=3, last_attempt=2)
    assert heard.lineage == ((1, 0), (2, 1))
    trained, _, _ = _journal(left, _went_on(2)[4:], RULES, seq=0)
    assert resume_event(trained, at_s=5.0, incarnation=3).lineage == ((1, 0), (2, 1))


def test_a_damaged_version_stays_left_out_when_the_starts_behind_it_are_forgotten() -> None:
    """Seen: the start from an older version trained nothing, and the damaged one counted again."""
    source = stored_source(2, 1)
    unloadable = ev.WorkerLeft(
        at_s=4.2, attempt=2, worker="w0002", how=ev.Leaving.UNLOADABLE, step=2, detail="damaged",
        damaged=(source,),
    )  # fmt: skip
    older = ev.CommittedRead(
        at_s=4.3, attempt=2, step=1, committed_by=1, skipped=(), number=2, stored=1
    )
    events = (RESUMED, *_went_on(2)[:3], unloadable, older)
    left, actions, _ = _journal(RunState(), events, RULES, seq=0)
    start = [action for action in actions if isinstance(action, act.StartAttempt)][-1]
    assert (start.attempt, start.resume_step) == (3, 1)

    stop = ev.StopRequested(at_s=4.7, reason="a slip")
    again = resume_event(_journal(left, (stop,), RULES, seq=0)[0], at_s=5.0, incarnation=3)
    assert (again.lineage, again.bad) == (((1, 0),), (source,))
    # Once that start has trained, the damaged version never counts again.
    formed = ev.WorkerFormed(at_s=4.5, attempt=3, worker="w0002")
    trained = ev.StepCompleted(at_s=5.0, attempt=3, step=2, step_s=0.5)
    crash = ev.WorkerExited(at_s=5.1, worker="w0002", cause="crash", detail="")
    read = replace(older, at_s=5.2, attempt=3, step=2, committed_by=3, number=3, stored=2)
    ready = ev.WorkerReady(at_s=6.0, worker="w0003", node="b", pid=13)
    state, _, _ = _journal(left, (formed, trained, crash, read, ready), RULES, seq=0)
    assert (state.attempt.number, state.attempt.step, state.bad) == (4, 2, ())


def test_a_run_goes_back_to_the_version_that_the_user_names() -> None:
    """Newer ones are not finite: they no longer count, in storage or elsewhere."""
    event = go_back(RESUMED, 1)
    read = ev.CommittedRead(
        at_s=3.0, attempt=2, step=1, committed_by=1, skipped=(), number=1, stored=1
    )
    state, actions, _ = _journal(RunState(), (event, read, *_went_on(2)[1:3]), RULES, seq=0)

    (asked,) = (action for action in actions if isinstance(action, act.ReadCommitted))
    assert asked.lineage == ((1, 0), (2, 1))
    (start,) = (action for action in actions if isinstance(action, act.StartAttempt))
    assert (start.attempt, start.resume_step, start.lineage) == (3, 1, ((1, 0), (2, 1), (3, 1)))
    assert state.phase is Phase.FORMING
