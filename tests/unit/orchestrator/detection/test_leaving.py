"""A worker that leaves a fenced attempt late is distinguished from a stuck one, by its process."""

from dataclasses import replace

import pytest

from orchestrator.detection import at_work
from tests.support.histories import ATTEMPT, WORKERS, calm, group, stop, watch
from workers.protocol import WorkerPhase, WorkerReport

_CALM = calm("w0", 0)
_WAITS = (group("world", range(4), 9, waiting_s=3.0),)


@pytest.mark.parametrize(
    ("row", "works"),
    [
        (_CALM, True),
        (replace(_CALM, os_state="R", beat_age_s=5.0), True),
        (replace(_CALM, os_state="D", beat_age_s=5.0), True),
        (replace(_CALM, phase=WorkerPhase.LEAVING), True),
        (stop(_CALM), False),
        (replace(_CALM, os_state="Z"), False),
        (replace(_CALM, beat_age_s=5.0), False),
        (replace(_CALM, groups=_WAITS), False),
        (replace(_CALM, phase=WorkerPhase.FORMING), False),
        (replace(_CALM, attempt=0, phase=WorkerPhase.IDLE), False),
    ],
    ids=[
        "beats in its own code", "runs and cannot beat", "waits for a page", "takes its last copy",
        "stopped", "gone", "silent", "waits in a collective", "waits for members", "has left",
    ],
)  # fmt: skip
def test_a_fenced_member_is_at_work_or_stuck(row: WorkerReport, works: bool) -> None:  # noqa: FBT001
    state, _ = watch([replace(row, step_s=10.0, phase_s=4.0)], for_s=3.0)
    assert at_work(state, attempt=ATTEMPT, members=("w0",)) == (("w0",) if works else ())


def test_a_node_that_says_nothing_proves_nothing() -> None:
    """Its member may have been stopped since, and would be waited for as long as a step takes."""
    rows = [calm(worker, rank) for rank, worker in enumerate(WORKERS)]
    node_of = {worker: f"n{rank}" for rank, worker in enumerate(WORKERS)}
    state, at_s = watch(rows, for_s=1.0, node_of=node_of)
    assert at_work(state, attempt=ATTEMPT, members=WORKERS) == WORKERS
    state, _ = watch(rows[:3], for_s=3.0, state=state, from_s=at_s + 0.25, node_of=node_of)
    assert at_work(state, attempt=ATTEMPT, members=WORKERS) == WORKERS[:3]
