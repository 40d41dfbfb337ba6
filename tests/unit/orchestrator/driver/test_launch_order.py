import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.driver.launch_order import one_launch
from orchestrator.errors import CapacityError

_HOLDER = """
import signal, sys
from orchestrator.driver.launch_order import one_launch
with one_launch(sys.argv[1], say=print):
    print("begun", flush=True)
    signal.pause()
"""


@contextmanager
def holder(directory: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command that launches until it is killed, as it is at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, directory], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_two_commands_that_begin_a_run_take_turns(tmp_path: Path) -> None:
    """Both would begin it, on a cluster each, and train into one directory."""
    directory, said = str(tmp_path / "run"), []

    with holder(directory) as other:

        def say(line: str) -> None:
            said.append(line)
            # The command also stops waiting for one that is killed.
            other.kill()

        with one_launch(directory, say=say):
            assert said == [
                f"another command is launching the run in {directory}; waiting for it ..."
            ], "both launch at once"
            assert other.wait(120) == -signal.SIGKILL

    with one_launch(directory, say=said.append):
        pass
    assert len(said) == 1, "no process holds it"


def test_a_launch_that_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    """An empty folder beside the real ones looks like a run that was lost."""
    (tmp_path / "runs/kept").mkdir(parents=True)
    for directory in ("runs/kept", "runs/new", "other/new"):
        with (
            pytest.raises(CapacityError),
            one_launch(str(tmp_path / directory), say=print),
        ):
            raise CapacityError("no cluster")

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "runs"]


def test_a_command_that_waited_for_a_refused_launch_has_the_directory(tmp_path: Path) -> None:
    """A lock on a folder that was removed meanwhile keeps no third command out."""
    directory, waits, entered = str(tmp_path / "run"), threading.Event(), threading.Event()

    def wait_and_launch() -> None:
        with one_launch(directory, say=lambda _: waits.set()):
            entered.set()
            assert Path(directory).is_dir()

    with ThreadPoolExecutor() as pool:
        refused = suppress(CapacityError)
        with refused, one_launch(directory, say=print):
            second = pool.submit(wait_and_launch)
            assert waits.wait(60)
            raise CapacityError("no cluster")
        second.result(60)

    assert entered.is_set()
    with holder(directory):
        pass
