from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.driver.launch_order import NumberedLaunches, one_launch
from orchestrator.errors import CapacityError
from ucp_core.storage import MemoryStore, Store

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


def test_of_two_commands_that_begin_a_run_one_waits_for_the_other(tmp_path: Path) -> None:
    """Both would begin it, on a cluster each, and train into one directory."""
    directory, said = str(tmp_path / "run"), []

    with holder(directory) as other:

        def say(line: str) -> None:
            said.append(line)
            # Also one that is killed is waited for no longer.
            other.kill()

        with one_launch(directory, say=say):
            assert said == [
                f"another command is launching the run in {directory}; waiting for it ..."
            ], "both launch at once"
            assert other.wait(120) == -signal.SIGKILL

    with one_launch(directory, say=said.append):
        pass
    assert len(said) == 1, "nobody holds it any more"


class World:
    """A store, and a clock that goes on only while somebody waits."""

    def __init__(self) -> None:
        self.store: Store = MemoryStore()
        self.at_s = 0.0
        self.others_write = False
        self.waited_s = 0.0

    def take(self, name: str = "launches") -> AbstractContextManager[object]:
        launches = NumberedLaunches(
            self.store, name, dead_s=60.0, now_s=lambda: self.at_s, pause=self.pause
        )
        return launches.next(lambda: None)

    def pause(self, seconds: float) -> None:
        self.at_s += seconds
        self.waited_s += seconds
        if self.others_write and self.waited_s < 1000:
            self.store.write_atomic("launches/000001.json", f"{self.at_s}".encode(), fsync=False)
        elif self.others_write:
            self.store.write_atomic("launches/000001.json", b'{"is_over": true}', fsync=False)


def test_a_launch_that_is_over_holds_nobody_up_and_its_number_never_comes_again() -> None:
    """A file that came twice would let two that have waited for it both take it."""
    world = World()

    for _ in range(3):
        with world.take():
            pass

    assert world.waited_s == 0
    assert world.store.list("launches") == ("000001.json", "000002.json", "000003.json")


def test_a_command_that_died_holds_up_for_a_minute_and_not_for_ever() -> None:
    """Its launch is never ended, and its file stays."""
    world = World()
    world.store.write_atomic("launches/000001.json", b'{"is_over": false}', fsync=False)

    with world.take():
        assert 60 <= world.waited_s < 70


def test_a_command_that_lives_is_waited_for_however_long_it_takes() -> None:
    """A cluster that takes minutes to start is no dead command."""
    world = World()
    world.store.write_atomic("launches/000001.json", b'{"is_over": false}', fsync=False)
    world.others_write = True

    with world.take():
        assert 1000 <= world.waited_s < 1010


def test_a_command_that_was_taken_for_dead_learns_that_another_took_over() -> None:
    """A laptop that slept wakes up where it was: about to begin a run that has begun."""
    launches = NumberedLaunches(MemoryStore(), "launches")

    with launches.next(lambda: None) as require:
        require()
        launches._store.write_atomic("launches/000002.json", b"", fsync=False)
        with pytest.raises(CapacityError, match=r"another command took over .* for 60 s; run it"):
            require()


class Meeting(MemoryStore):
    """A store that shows two threads the same the first time that they look."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)
        self._mine = threading.local()

    def list(self, directory: str) -> tuple[str, ...]:
        names = super().list(directory)
        if not hasattr(self._mine, "has_looked"):
            self._mine.has_looked = True
            self._both.wait()
        return names


def test_of_two_that_find_no_launch_at_once_one_begins() -> None:
    """To look and then to write lets both begin."""
    store, inside, other_waits = Meeting(), threading.Lock(), threading.Event()

    def command() -> bool:
        launches = NumberedLaunches(store, "launches", pause=lambda _: None)
        with launches.next(other_waits.set):
            is_alone = inside.acquire(blocking=False)
            if is_alone:
                other_waits.wait()
                inside.release()
            other_waits.set()
        return is_alone

    with ThreadPoolExecutor(2) as pool:
        commands = [pool.submit(command) for _ in range(2)]

    assert [one.result() for one in commands] == [True, True]


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
