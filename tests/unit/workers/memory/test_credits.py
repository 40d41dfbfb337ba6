"""Credits: as many as there are, back from whoever dies, and never a reason to stop."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.snapshots import eventually
from workers.memory import Credits


def hold(directory: Path, pipe: Connection) -> None:
    """Take a credit, say so, and keep it."""
    with Credits(directory, 1).one() as has:
        pipe.send(has)
        signal.pause()


def test_there_are_no_more_than_there_are(tmp_path: Path) -> None:
    """Each holds its own; the next one has to do without."""
    ranks = [Credits(tmp_path, 2) for _ in range(3)]
    with ranks[0].one(0.0) as first, ranks[1].one(0.0) as second:
        assert first
        assert second
        with ranks[2].one(0.0) as third:
            assert not third
    with ranks[2].one(0.0) as third:
        assert third


def test_a_killed_process_gives_its_credit_back_and_a_stopped_one_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """Snapshots of the other ranks go on in both cases."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert pipe.recv()
    assert process.pid is not None
    mine = Credits(tmp_path, 1)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        with mine.one(0.05) as has:
            assert not has
            assert time.monotonic() - begun_s >= 0.05
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def is_back() -> bool:
        with mine.one(0.0) as has:
            return has

    assert eventually(is_back)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_keeps_no_credit(tmp_path: Path) -> None:
    """Those that load a script's data live as long as the training."""
    mine = Credits(tmp_path, 1)
    with mine.one() as has:
        assert has
        pid = os.fork()
        if pid == 0:
            signal.pause()
    try:
        with mine.one(0.0) as has:
            assert has
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_directory_that_cannot_be_written_gives_no_credit_and_no_error(tmp_path: Path) -> None:
    """A full disk is no reason to take no snapshots."""
    (tmp_path / "credits").write_text("in the way")
    with Credits(tmp_path, 1).one() as has:
        assert not has
