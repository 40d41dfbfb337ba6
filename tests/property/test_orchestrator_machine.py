from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import RunRules, RunState, resume_event, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from tests.simulation.checkers import check

WORKERS = st.sampled_from([f"w{n:04d}" for n in range(1, 6)] + ["stranger"])
NODES = st.sampled_from(["a", "b", "c"])
RESERVATIONS = st.integers(1, 6)
ATTEMPTS = st.integers(0, 4)
STEPS = st.integers(0, 12)

#: Values of a field, by its name: few, so that events meet and contradict each other.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "incarnation": st.integers(1, 3),
    "alive": st.lists(
        st.tuples(WORKERS, NODES, ATTEMPTS), max_size=4, unique_by=lambda entry: entry[0]
    ).map(tuple),
    "reservations": st.lists(
        st.tuples(RESERVATIONS, NODES), max_size=3, unique_by=lambda entry: entry[0]
    ).map(tuple),
    "pending_reservations": st.just(()),
    "node": NODES,
    "deadline_s": st.floats(0, 100),
    "reservation": RESERVATIONS,
    "worker": WORKERS,
    "pid": st.just(1),
    "cause": st.sampled_from(["crash", "node", "killed", "preempted"]),
    "attempt": ATTEMPTS,
    "step": STEPS,
    "step_s": st.floats(0.01, 1),
    "how": st.sampled_from(["completed", "yielded", "fenced", "peer_lost"]),
    "error": st.sampled_from(["ValueError: x", "CheckpointCorruptError: y"]),
    "guilty": st.lists(WORKERS, max_size=2, unique=True).map(tuple),
    "committed_by": ATTEMPTS,
    "number": st.integers(0, 4),
    "num": st.integers(1, 3),
    "source": st.sampled_from(["memory", "storage", ""]),
}
TEXTS = ("detail", "notice", "traceback", "evidence", "reason", "fault", "target")
KINDS = (
    ev.ControllerStarted,
    ev.RunResumed,
    ev.WorkersSurveyed,
    ev.NodeJoined,
    ev.NodeLost,
    ev.NodeDraining,
    ev.ControllerDraining,
    ev.ReservationGranted,
    ev.WorkerReady,
    ev.WorkerExited,
    ev.WorkerFormed,
    ev.StepCompleted,
    ev.CheckpointCommitted,
    ev.WorkerLeft,
    ev.WorkerRaised,
    ev.HangFound,
    ev.CommittedRead,
    ev.StopRequested,
    ev.WorkersSet,
    ev.FaultInjected,
    ev.Ticked,
)


def _values(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    if kind is ev.RunResumed:
        return st.fixed_dictionaries(
            {"incarnation": FIELDS["incarnation"]}
        )  # the rest is that of the state
    names = [name for name in kind.__slots__ if name != "at_s"]  # type: ignore[attr-defined]
    known = {name: FIELDS[name] for name in names if name in FIELDS}
    texts = {name: st.just("text") for name in names if name in TEXTS}
    return st.fixed_dictionaries({**known, **texts, **_skipped(names)})


def _skipped(names: list[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {"skipped": st.just(())} if "skipped" in names else {}


EVENTS = st.sampled_from(KINDS).flatmap(
    lambda kind: st.tuples(st.just(kind), _values(kind), st.floats(0, 5))
)


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(history=st.lists(EVENTS, max_size=60), standby=st.integers(0, 1))
def test_every_event_is_legal_in_every_phase(history: list[Any], standby: int) -> None:
    """Not only what a sane world does: reports of the dead, of strangers, of the future."""
    rules = RunRules(
        run="t", min_workers=1, max_workers=3, total_steps=10, standby_per_node=standby
    )
    state, now_s, newest = RunState(), 0.0, 0
    for kind, values, pause_s in [(ev.ControllerStarted, {"incarnation": 1}, 0.0), *history]:
        now_s += pause_s
        before = state
        event = (
            resume_event(before, at_s=now_s, **values)
            if kind is ev.RunResumed
            else kind(at_s=now_s, **values)
        )
        state, actions = step(before, event, rules=rules)
        check(state)
        for action in actions:
            if isinstance(action, act.StartAttempt):
                assert action.attempt > newest
                newest = action.attempt
        assert actions or state is before or state != before, "an equal state is the same object"
