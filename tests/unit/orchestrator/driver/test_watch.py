"""``everstep watch`` with commands that are scripts: what it does is decided by how they end."""

import os
import signal
import sys
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, load
from orchestrator.driver.run import Run
from orchestrator.driver.signals import Interrupt
from orchestrator.driver.watch import Watched, pause_s, watch_run
from orchestrator.errors import CapacityError

#: Exit codes of ``everstep run``. After the first try, BAD may be the storage's.
LOST, OVER, BAD = 3, 0, 2


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load(f"run: {{directory: {tmp_path}/run}}\nworkers: {{max: 1}}\n")


def _watch(config: RunConfig, *scripts: str) -> tuple[Watched, list[str]]:
    """Watch commands that do what ``scripts`` say in the run directory."""
    folder = Path(config.run.directory)
    folder.mkdir()
    begin = f"import os, signal, sys; os.chdir({str(folder)!r}); "
    said: list[str] = []
    watched = watch_run(
        [[sys.executable, "-c", begin + script] for script in scripts],
        config,
        is_final=lambda code, num_before: code == OVER or (code == BAD and not num_before),
        say=said.append,
    )
    return watched, said


def _end(outcome: str, code: int) -> str:
    return f"open('summary.json', 'w').write('{{\"outcome\": \"{outcome}\"}}'); sys.exit({code})"


def test_a_lost_cluster_is_tried_again_and_the_next_one_takes_its_turn(config: RunConfig) -> None:
    """The other address may be the only one that ever comes back."""
    watched, said = _watch(config, f"sys.exit({LOST})", _end("completed", OVER))

    assert watched == Watched(code=OVER, summary={"outcome": "completed"})
    assert said == ["trying again in 1 s; Ctrl-C cancels"]


def test_a_command_that_a_signal_killed_is_tried_again(config: RunConfig) -> None:
    """Ray ends a driver without a word, and the kernel one that takes too much memory."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"

    assert _watch(config, kill, _end("completed", OVER))[0].code == OVER


def test_pauses_grow_to_a_minute() -> None:
    """A cluster that is away for a day must not cost a core, nor be missed for long."""
    assert [pause_s(number) for number in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(("outcome", "code"), [("failed", 1), ("no_capacity", LOST)])
def test_a_run_that_has_failed_is_not_tried_again(
    config: RunConfig, outcome: str, code: int
) -> None:
    """The same codes say that a cluster was lost; the summary tells which."""
    watched, said = _watch(config, _end(outcome, code))

    assert watched.code == code
    assert said == []


def test_a_run_that_ended_as_its_command_died_is_over(config: RunConfig) -> None:
    """A run that somebody has stopped must not begin again."""
    killed = "os.kill(os.getpid(), signal.SIGKILL)"

    watched, said = _watch(config, _end("stopped", OVER).partition(";")[0] + f"; {killed}")

    assert watched == Watched(code=None, summary={"outcome": "stopped"})
    assert said == []


def test_bad_input_is_not_tried_again(config: RunConfig) -> None:
    """It would be as bad the next time."""
    assert _watch(config, f"sys.exit({BAD})")[0].code == BAD


def test_what_was_good_input_before_may_be_so_again(config: RunConfig) -> None:
    """Storage that was away for a minute ended the watch of a run for good."""
    scripts = [f"sys.exit({LOST})", f"sys.exit({BAD})", _end("completed", OVER)]
    watched, said = _watch(config, *scripts)

    assert (watched.code, len(said)) == (OVER, 2)


def test_a_run_that_was_ended_by_force_is_left_alone(config: RunConfig) -> None:
    """The user who did it saw it come back a second later."""
    contact = "open('controller.json', 'w').write('{}'); "
    by_force = "from orchestrator.driver.run import Run; Run('.').note_killed(); "

    with pytest.raises(CapacityError, match="ended by force"):
        _watch(config, contact + by_force + f"sys.exit({LOST})")
    assert Run(config.run.directory).killed_at() is not None


def test_without_a_cluster_it_waits_as_long_as_for_workers(config: RunConfig) -> None:
    """A budget that is spent ends the run, and so must one that is spent between two clusters."""
    short = config.recovery.model_copy(update={"capacity_wait_s": 0.5})

    with pytest.raises(CapacityError, match=r"no cluster advanced the run for 0\.5 s"):
        _watch(config.model_copy(update={"recovery": short}), f"sys.exit({LOST})")


def test_a_signal_is_passed_on_and_ends_it(config: RunConfig) -> None:
    """The command then stops at a step boundary, and the watch waits for it."""
    stop = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "

    watched, said = _watch(config, stop + f"os.kill({os.getpid()}, signal.SIGTERM); signal.pause()")

    assert watched.code == 143
    assert said == []


def test_a_signal_in_a_pause_ends_it(config: RunConfig) -> None:
    """There is no command then that could take it."""

    def interrupted(_line: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    Path(config.run.directory).mkdir()
    with pytest.raises(Interrupt) as ended:
        watch_run(
            [[sys.executable, "-c", f"raise SystemExit({LOST})"]],
            config,
            is_final=lambda _code, _num_before: False,
            say=interrupted,
        )
    assert ended.value.number is signal.SIGTERM
