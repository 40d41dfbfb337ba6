"""Where the time of a run went, for any journal."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import RunStats

_ROUNDING_S = 1e-6
_KINDS = (
    *("StepCompleted", "StepCompleted", "StepCompleted", "StartAttempt", "WorkerFormed"),
    *("FenceAttempt", "YieldAttempt", "ReadCommitted", "WorkerLeft", "SavesMeasured"),
    *("ControllerStarted", "RunResumed", "FinishRun"),
)


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return a journal of any events in any order; some clocks go back, as after a restart."""
    at_s, attempt, made = 0.0, 0, []
    for kind in draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=40)):
        at_s = max(0.0, at_s + draw(st.floats(-1.0, 100.0)))
        attempt += kind == "StartAttempt"
        step, stall_s = draw(st.integers(0, 30)), draw(st.floats(0.0, 100.0))
        costs: dict[str, Any] = {
            "step_s": draw(st.floats(0.01, 10.0)),
            "snapshot_stall_s": stall_s,
            "checkpoint_stall_s": stall_s,
            "pace": {"snapshot_steps": 1},
        }
        costs["pace"]["checkpoint_steps"] = draw(st.integers(0, 3))
        made.append(
            {
                "kind": kind,
                "at_s": at_s,
                "attempt": attempt,
                "step": step,
                "step_s": stall_s,
                "resume_step": step,
                "layout": {},
                "placed": [["a", [1], [0]]],
                "worker": "w0001",
                "how": "completed",
                "costs": costs,
                "incarnation": 2,
                "why": "",
                "outcome": "stopped",
                "reason": "",
            }
        )
    return made


@given(records())
def test_the_parts_are_not_negative_and_add_up_to_all_time(journal: list[dict[str, Any]]) -> None:
    """One step's time was taken for that of all, and what was too much was cut off at 100 %."""
    stats = RunStats()
    for record in journal:
        stats.add(record)
        parts_s = stats.parts_s

        assert min(parts_s.values()) > -_ROUNDING_S
        assert abs(sum(parts_s.values()) - stats.wall_s) < _ROUNDING_S
        assert 0.0 <= round(stats.goodput, 9) <= round(stats.goodput_since_start, 9) <= 1.0
