"""A keeper's view of a worker's process from outside, and its actions on it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.keeper import progress_path, ring_path
from workers.keeper.trainer_watch import SETTLED_S, NodeWatch, clear, dead_workers
from workers.protocol import WorkerPhase
from workers.telemetry import ProgressRecord, RecordRing, last_ring_path, process_state

WORKER = """
import signal, sys, os
from workers.telemetry.progress import ProgressRecord
ProgressRecord.create(sys.argv[1], worker="w0001")
print("ready", flush=True)
signal.pause()
"""


def _until(condition: object, *, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it never came true"


def test_stopped_worker_is_killed_for_sure(tmp_path: Path) -> None:
    """A stopped process hears no request to go; left alone it wakes when its parent dies."""
    command = [sys.executable, "-c", WORKER, str(progress_path(tmp_path, "w0001"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        os.kill(worker.pid, signal.SIGSTOP)
        _until(lambda: process_state(worker.pid).letter == "T")
        watch = NodeWatch(node="a", directory=tmp_path)
        watch.look()
        assert dead_workers(tmp_path) == frozenset(), "a stopped one may go on"
        assert watch.workers == ("w0001",)
        assert watch.lives("w0001")

        watch.kill("w0001")

        assert worker.wait(120) == -signal.SIGKILL
        assert not watch.lives("w0001")

    assert dead_workers(tmp_path) == {"w0001"}


def test_the_dead_are_reported_on_and_then_forgotten(tmp_path: Path) -> None:
    """A worker that crashes every minute for a week would leave ten thousand pages to look at."""
    living = ProgressRecord.create(progress_path(tmp_path, "w0002"), worker="w0002")
    command = [sys.executable, "-c", WORKER, str(progress_path(tmp_path, "w0001"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        ring_path(tmp_path, "w0001").touch()
        last_ring_path(ring_path(tmp_path, "w0001")).touch()
        patient = NodeWatch(node="a", directory=tmp_path, forget_s=3600.0)
        watch = NodeWatch(node="a", directory=tmp_path, forget_s=0.0)
        assert _reported(watch) == ["w0001", "w0002"]
        worker.kill()
        worker.wait(120)
    assert [_reported(patient), _reported(patient)] == [["w0001", "w0002"]] * 2

    assert _reported(watch) == ["w0001", "w0002"], "its end is worth a report"

    left = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert left == {"w0001.gone": 0, "w0002.progress": left["w0002.progress"]}
    assert dead_workers(tmp_path) == {"w0001"}, "its memory is still to be inherited"
    assert _reported(watch) == ["w0002"]
    assert _reported(patient) == ["w0002"]
    living.close()


def test_what_a_lost_node_left_goes_with_the_run_and_what_lives_stays(tmp_path: Path) -> None:
    """A keeper that was killed with its node removes nothing; one that is only cut off may come
    back."""
    run = tmp_path / "everstep-run"
    mine, lost, living, listening = (run / name for name in ("mine", "lost", "living", "door"))
    for directory in (mine, lost, living, listening):
        directory.mkdir(parents=True)
    (mine / "w0009.ring").write_bytes(b"")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(progress_path(place, "w0001"))],
            stdout=subprocess.PIPE,
        )
        for place in (lost, living, listening)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        for index in (0, 2):
            workers[index].kill()
            workers[index].wait(120)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(str(listening / "door"))
            door.listen()

            clear(mine)

            assert sorted(path.name for path in run.iterdir()) == ["door", "living"]
            assert progress_path(living, "w0001").exists()
            door.setblocking(False)
            with pytest.raises(BlockingIOError):
                door.accept()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    clear(mine)
    assert not run.exists()


def test_the_page_of_an_older_process_kills_no_process(tmp_path: Path) -> None:
    """Pids are used again: the start time on the page tells whether it is still the same one."""
    page = ProgressRecord.create(progress_path(tmp_path, "w0001"), worker="w0001")
    data = bytearray(progress_path(tmp_path, "w0001").read_bytes())
    data[24:32] = (1).to_bytes(8, "little")  # the start time in the page's header
    page.close()
    progress_path(tmp_path, "w0001").write_bytes(data)
    watch = NodeWatch(node="a", directory=tmp_path)
    watch.look()

    watch.kill("w0001")  # would be this very process

    assert watch.report().workers[0].os_state == "X"


def test_only_milestones_are_news(tmp_path: Path) -> None:
    """A report per step would cost a fast run more than its heartbeat is worth."""
    page = ProgressRecord.create(progress_path(tmp_path, "w0001"), worker="w0001")
    watch = NodeWatch(node="a", directory=tmp_path)

    appeared = watch.look()
    page.assign(1, 0)
    page.enter(WorkerPhase.FORWARD)
    formed = watch.look()
    page.completed(1, 0.1, 2.0)
    first_step = watch.look()
    page.completed(2, 0.1, 2.0)
    second_step = watch.look()
    page.close()

    assert (appeared, formed, first_step, second_step) == (True, True, True, False)
    assert watch.still_s() < 1.0


def test_directory_is_listed_until_its_time_is_past_and_then_when_that_changes(
    tmp_path: Path,
) -> None:
    """Two workers may come within one tick of the clock that dates the directory."""
    first = ProgressRecord.create(progress_path(tmp_path, "w0001"), worker="w0001")
    changed_ns = tmp_path.stat().st_mtime_ns
    watch = NodeWatch(node="a", directory=tmp_path)
    assert _reported(watch) == ["w0001"]

    second = ProgressRecord.create(progress_path(tmp_path, "w0002"), worker="w0002")
    os.utime(tmp_path, ns=(changed_ns, changed_ns))
    assert _reported(watch) == ["w0001", "w0002"]

    time.sleep(SETTLED_S)  # the tick is over: from here on nothing can come at that time
    assert _reported(watch) == ["w0001", "w0002"]
    third = ProgressRecord.create(progress_path(tmp_path, "w0003"), worker="w0003")
    os.utime(tmp_path, ns=(changed_ns, changed_ns))
    assert _reported(watch) == ["w0001", "w0002"], "it was listed for nothing"

    os.utime(tmp_path)
    assert _reported(watch) == ["w0001", "w0002", "w0003"]
    for page in (first, second, third):
        page.close()


PARENT = """
import subprocess, sys
from workers.telemetry.progress import ProgressRecord
ProgressRecord.create(sys.argv[1], worker="w0001")
spin = "print(flush=True)\\nwhile True: pass"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_what_children_of_children_compute_counts_while_a_worker_stands_still(
    tmp_path: Path,
) -> None:
    """A compiler starts processes in a process of its own; the worker sleeps meanwhile."""
    command = [sys.executable, "-c", PARENT, str(progress_path(tmp_path, "w0001"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        try:
            worker.stdout.readline()
            watch = NodeWatch(node="a", directory=tmp_path)
            watch.look()
            assert watch.report().workers[0].children_s == 0.0, "it has only come"

            def used_s() -> float:
                watch.look()
                return watch.report().workers[0].children_s

            _until(lambda: used_s() > 0.3)
        finally:
            os.killpg(child, signal.SIGKILL)
            worker.kill()


def test_each_report_tells_the_steps_since_the_one_before(tmp_path: Path) -> None:
    """Twice told they would count twice; those of the attempt before are no steps of this one."""
    page = ProgressRecord.create(progress_path(tmp_path, "w0001"), worker="w0001")
    page.assign(1, 0)
    watch = NodeWatch(node="a", directory=tmp_path)
    ring = RecordRing(ring_path(tmp_path, "w0001"), attempt=1, num_ranks=2)
    steps: list[list[int] | None] = []
    for step in (1, 2, 3):
        for op in ("data", "forward", "backward", "optimizer"):
            ring.span(op, step=step)
        ring.span("")
        if step > 1:
            steps.append(_told_steps(watch))
    steps.append(_told_steps(watch))
    page.assign(2, 0)
    steps.append(_told_steps(watch))
    page.close()

    assert steps == [[1, 2], [3], [], None]


def _told_steps(watch: NodeWatch) -> list[int] | None:
    (row,) = watch.report().workers
    return None if row.digest is None else [cost.step for cost in row.digest.costs]


def _reported(watch: NodeWatch) -> list[str]:
    return [row.worker for row in watch.report().workers]
