"""No collector deletes what a reader of another process is in the middle of."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import assert_loaded, save, small_state, whole_need
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.native import collect_garbage, load, open_checkpoint
from ucp_core.storage import LocalStore, join

_LINEAGE = [(1, 0)]


@contextmanager
def reader(directory: str, seed: int) -> Iterator[subprocess.Popen[str]]:
    """Start a reader and yield it while it stands in the middle of loading."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.reader_process", directory, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Save three checkpoints, of seeds and steps 1 to 3."""
    for step in (1, 2, 3):
        save(LocalStore(), small_state(step), step=step, root=str(tmp_path))
    return str(tmp_path)


def test_what_is_read_is_left_until_the_reader_is_done(root: str) -> None:
    """A conversion beside the training reads what the training calls old."""
    store = LocalStore()
    with reader(join(root, "step-00000001"), seed=1) as process:
        assert collect_garbage(store, root, keep=1, lineage=_LINEAGE) == ["step-00000002"]

        assert store.list(root) == ("step-00000001", "step-00000003")
        _, errors = process.communicate("go on\n", timeout=240)
        assert process.returncode == 0, errors

    assert collect_garbage(store, root, keep=1, lineage=_LINEAGE) == ["step-00000001"]


def test_a_killed_reader_holds_nothing(root: str) -> None:
    """A lease file would last for hours; the kernel frees its lock at once."""
    store = LocalStore()
    with reader(join(root, "step-00000001"), seed=1) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=240)

    assert collect_garbage(store, root, keep=1, lineage=_LINEAGE) == [
        "step-00000002",
        "step-00000001",
    ]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_readers_and_a_collector_never_meet_in_a_checkpoint(tmp_path: Path) -> None:
    """Saving, collecting and loading at once: what is loaded is right, or it is told to be gone."""
    root, store = str(tmp_path / "run"), LocalStore()
    save(store, small_state(1), step=1, root=root)
    enough = tmp_path / "enough"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # Either of the two may be given little of a busy machine.
            for step in range(2, 10_000):
                save(store, small_state(step), step=step, root=root)
                collect_garbage(store, root, keep=1, lineage=_LINEAGE)
                if step >= 60 and enough.exists():
                    break
            code = 0
        finally:
            os._exit(code)
    num_loaded = 0
    ended, status = 0, 0
    try:
        while not ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if num_loaded > 10:
                enough.touch()
            for name in reversed(store.list(root)):
                state = small_state(int(name.removeprefix("step-")))
                need = whole_need(state)
                try:
                    load(open_checkpoint(store, join(root, name)), need)
                except CheckpointNotFoundError:
                    continue
                assert_loaded(state, need)
                num_loaded += 1
    finally:
        enough.touch()

    assert status == 0
    assert num_loaded > 10
    # Checkpoints held at the last call are left for the next one.
    newest = max(store.list(root))
    collect_garbage(store, root, keep=1, lineage=_LINEAGE)
    assert store.list(root) == (newest,)
