"""Ranks that take snapshots are killed, or stopped, at every change that they make to memory.

Between two blocks of a tensor, two ranks, the record and the header, the header and the pin; with
the keepers of both nodes, or of one of them.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.doomed_run import CALM_STEPS, DOOMED_STEPS, DoomedRun
from tests.support.snapshots import eventually

pytestmark = pytest.mark.timeout(600)

MOMENTS_MAX = 200
#: Moments of two snapshots of two ranks: begun, filled, finished. There are more, but what two
#: threads change at once counts once.
MOMENTS_MIN = 2 * 2 * 3


def doomed_runs(
    make: Callable[[Path], DoomedRun], directory: Path, number: signal.Signals
) -> Iterator[DoomedRun]:
    """Yield a run for each moment, at which the signal came."""
    for after in range(MOMENTS_MAX):
        with closing(make(directory / str(after))) as run:
            has_come = run.doom(after, number)
            yield run
        if not has_come:
            assert after >= MOMENTS_MIN, "not every moment was counted"
            return
    pytest.fail("there are more moments than were tried")


def test_trainers_are_killed_at_every_moment(tmp_path: Path) -> None:
    """The newest version of all ranks is there, and with one of the nodes lost, the one before."""
    seen = []
    for run in doomed_runs(DoomedRun, tmp_path, signal.SIGKILL):
        run.trainer.kill()
        step, _ = run.newest(run.nodes)
        assert step >= max(CALM_STEPS, run.furthest() - 1)
        run.nodes[0].kill()
        left, _ = run.newest(run.nodes[1:])

        assert left >= max(CALM_STEPS, step - 1)
        seen.append(step)
    assert set(seen) == set(range(CALM_STEPS, CALM_STEPS + DOOMED_STEPS + 1))


def test_trainers_of_an_old_attempt_wake_at_every_moment_and_nothing_they_write_counts(
    tmp_path: Path,
) -> None:
    """They were taken for dead, and come further than the run that goes on without them."""
    for run in doomed_runs(DoomedRun, tmp_path, signal.SIGSTOP):
        zombie = run.trainer
        run.begin(num_snapshots=1)
        version = (run.trainer.last_step(), 3)
        zombie.wake()
        zombie.last_step()

        assert run.newest(run.nodes) == version
        assert _comes_to(run, version)
        run.nodes[0].kill()
        assert run.newest(run.nodes[1:]) == version


def _comes_to(run: DoomedRun, version: tuple[int, int]) -> bool:
    """Return whether the second node alone comes to have a version."""
    return eventually(lambda: run.newest(run.nodes[1:]) == version)
