"""The progress page and what an observer makes of it."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import until
from workers.protocol import (
    NUM_COSTS_MAX,
    Digest,
    GroupState,
    NodeReport,
    StepCost,
    StepFacts,
    WorkerPhase,
    WorkerReport,
)
from workers.telemetry import (
    ProgressRecord,
    RecordRing,
    RingReader,
    RingView,
    process_state,
    processes,
    read_progress,
    report_on,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.progress"


def _observe(worker: str, page: Path, ring: Path, *, now_ns: int) -> WorkerReport:
    view = read_progress(page)
    return report_on(worker, view, RingReader(ring).look(now_ns=now_ns), now_ns=now_ns)


def test_what_is_stored_is_read(path: Path) -> None:
    """Each store keeps what the others have stored."""
    page = ProgressRecord.create(path, worker="w0007")
    page.assign(4, 2)
    page.enter(WorkerPhase.BACKWARD)
    page.evaluated(2.5)
    page.completed(12, 0.25, 3.5, StepFacts(grad_norm=0.5, tokens=64.0))
    page.micro_batch(3)
    page.moved(100)
    page.moved(28)
    page.close()

    view = read_progress(path)

    assert view is not None
    assert (view.worker, view.pid, view.attempt, view.rank) == ("w0007", os.getpid(), 4, 2)
    assert (view.phase, view.step, view.micro_batch) == (WorkerPhase.BACKWARD, 12, 3)
    assert view.moved_bytes == 128
    assert (view.step_s, view.loss) == (0.25, 3.5)
    told = {name: one for name, one in view.facts._asdict().items() if not math.isnan(one)}
    assert told == {"grad_norm": 0.5, "tokens": 64.0, "validation_loss": 2.5}


def test_a_new_attempt_starts_without_a_step_time(path: Path) -> None:
    """The first step of an attempt is slow; judged by the last attempt's it would look hung."""
    page = ProgressRecord.create(path, worker="w0")
    page.completed(12, 0.25, 3.5, StepFacts(grad_norm=0.5))
    page.evaluated(2.5)
    page.assign(5, 0)
    page.close()

    view = read_progress(path)

    assert view is not None
    assert (view.step, view.step_s, math.isnan(view.loss)) == (12, 0.0, True)
    assert (math.isnan(view.facts.grad_norm), view.facts.validation_loss) == (True, 2.5)


def test_the_beat_goes_on_while_the_training_thread_does_nothing(path: Path) -> None:
    """It is what tells a stuck process from a stopped one."""
    page = ProgressRecord.create(path, worker="w0")
    first = read_progress(path)
    assert first is not None

    def has_beaten() -> bool:
        view = read_progress(path)
        return view is not None and view.beat_ns > first.beat_ns

    until(has_beaten, "a beat")
    page.close()


def test_no_page_and_a_foreign_page_read_as_none(path: Path) -> None:
    """A keeper lists a directory in which anything may lie."""
    assert read_progress(path) is None
    path.write_bytes(b"short")
    assert read_progress(path) is None
    path.write_bytes(os.urandom(4096))
    assert read_progress(path) is None


CHILD = """
import sys, time
from workers.telemetry.progress import ProgressRecord
from workers.protocol import WorkerPhase, WorkerReport
page = ProgressRecord.create(sys.argv[1], worker="w0")
page.assign(3, 1)
page.enter(WorkerPhase.FORWARD)
time.sleep(600)
"""


def test_a_stopped_and_a_dead_process_are_still_read(path: Path, tmp_path: Path) -> None:
    """They cannot answer a question, so nothing is asked of them."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)])
    ring_path = tmp_path / "w0.ring"

    def state() -> tuple[str, int, WorkerPhase]:
        report = _observe("w0", path, ring_path, now_ns=time.monotonic_ns())
        return report.os_state, report.attempt, report.phase

    try:
        until(lambda: state()[2] is WorkerPhase.FORWARD, "the forward phase")
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: state() == ("T", 3, WorkerPhase.FORWARD), "the stop")
        report = _observe("w0", path, ring_path, now_ns=time.monotonic_ns() + 5_000_000_000)
        assert report.beat_age_s > 5.0
    finally:
        child.kill()
    until(lambda: state() == ("Z", 3, WorkerPhase.FORWARD), "the zombie")
    child.wait()
    assert state() == ("X", 3, WorkerPhase.FORWARD)


STARVED = """
import sys, threading, time
from workers.telemetry.progress import ProgressRecord
ProgressRecord.create(sys.argv[1], worker="w0").close()
def spin():
    while True:
        pass
spinning = threading.Thread(target=spin, daemon=True)
spinning.start()
print(spinning.native_id, threading.get_native_id(), flush=True)
time.sleep(600)
"""


def test_a_process_that_only_waits_for_a_processor_is_seen_to_run(path: Path) -> None:
    """On a machine with too much to do a beat comes late, and the worker is as well as any."""
    command = [sys.executable, "-c", STARVED, str(path)]

    def state_with(beater: int) -> str:
        with path.open("r+b") as page:
            page.seek(72)
            page.write(beater.to_bytes(8, "little"))
        later_ns = time.monotonic_ns() + 5_000_000_000
        return _observe("w0", path, path, now_ns=later_ns).os_state

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        spinning, sleeping = map(int, child.stdout.readline().split())
        try:
            until(lambda: state_with(sleeping) == "S", "the process to sleep")
            assert state_with(spinning) == "R"
        finally:
            child.kill()


def test_another_process_of_the_same_pid_is_not_taken_for_the_worker(path: Path) -> None:
    """Process ids come round; on a busy node within hours."""
    ProgressRecord.create(path, worker="w0").close()
    started_ticks = process_state(os.getpid()).started_ticks
    page = bytearray(path.read_bytes())
    page[24:32] = (started_ticks + 1).to_bytes(8, "little")
    path.write_bytes(page)

    assert _observe("w0", path, path, now_ns=time.monotonic_ns()).os_state == "X"


def test_the_status_of_a_process_is_not_from_before_it_exited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code 0 was reported for 26 of 13,000 exits with code 7."""
    running = Path("/proc/self/stat").read_bytes().split()
    exiting = [*running]
    exiting[8] = str(int(running[8]) | processes._EXITING).encode()
    exited = [*exiting[:-1], str(7 << 8).encode()]
    reads = iter([b" ".join(exiting), b" ".join(exited)])
    monkeypatch.setattr(processes, "_read_at_once", lambda _: next(reads))

    assert process_state(os.getpid()).exit_status == 7 << 8


def test_a_ring_of_another_attempt_is_left_out(path: Path, tmp_path: Path) -> None:
    """Between two attempts the page is already new and the ring still old."""
    page = ProgressRecord.create(path, worker="w0")
    page.assign(4, 0)
    page.close()
    ring_path = tmp_path / "w0.ring"
    ring = RecordRing(ring_path, attempt=3, num_ranks=2)
    ring.enter(ring.group("world", (0, 1)), "all_reduce", 8)

    assert _observe("w0", path, ring_path, now_ns=time.monotonic_ns()).groups == ()
    page.assign(3, 0)
    assert len(_observe("w0", path, ring_path, now_ns=time.monotonic_ns()).groups) == 1


def test_groups_that_did_not_fit_are_reported(path: Path, tmp_path: Path) -> None:
    """A rank that waits in one of them would look like one that does not wait."""
    page = ProgressRecord.create(path, worker="w0")
    page.assign(3, 0)
    page.close()
    ring_path = tmp_path / "w0.ring"
    ring = RecordRing(ring_path, attempt=3, num_ranks=2)
    while ring.group("more", (0, 1)) >= 0:
        pass

    assert _observe("w0", path, ring_path, now_ns=time.monotonic_ns()).num_dropped == 1


def test_what_a_rank_says_of_its_own_work_takes_few_bytes(path: Path) -> None:
    """Each of thousands of ranks says it each second."""
    ProgressRecord.create(path, worker="w0").close()
    groups = tuple(
        GroupState(
            group=f"g{index}", ranks=range(8), entered_seq=1000, finished_seq=999, op="all_reduce",
            size_bytes=1024, waiting_s=0.0,
        )
        for index in range(8)
    )  # fmt: skip
    digest = Digest(
        costs=tuple(StepCost(1000 + step, 1 / (step + 3), 0.01) for step in range(NUM_COSTS_MAX)),
        span="backward",
        span_s=0.125,
    )
    view = read_progress(path)
    bare = report_on("w0", view, RingView(0, groups), now_ns=0)
    hashed = tuple(replace(one, dtype=1, history=4155503759) for one in groups)
    full = report_on("w0", view, RingView(0, hashed), now_ns=0, digest=digest)

    def size_bytes(row: WorkerReport) -> int:
        other = pickle.loads(pickle.dumps(row))
        reports = [NodeReport(node="a", seq=1, workers=rows) for rows in ((row,), (row, other))]
        return len(pickle.dumps(reports[1])) - len(pickle.dumps(reports[0]))

    assert full.digest is not None
    sent = pickle.loads(pickle.dumps(full.digest))
    assert [cost.step for cost in sent.costs] == [cost.step for cost in digest.costs]
    assert sent.costs[1].compute_s == pytest.approx(digest.costs[1].compute_s)
    assert size_bytes(full) - size_bytes(bare) <= 200


def test_an_observer_does_not_import_torch() -> None:
    """A keeper on every node would pay 2 s at each start and 200 MB for nothing."""
    code = "import sys, workers.telemetry.progress; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BUSY = """
import sys, threading, time
from workers.telemetry.progress import ProgressRecord
page = ProgressRecord.create(sys.argv[1], worker="w0")
page.assign(1, 0)
def spin():
    while True:
        pass
print(flush=True)
if sys.stdin.readline() == "help\\n":
    threading.Thread(target=spin, daemon=True).start()
sys.stdin.readline()
while True:
    pass
"""


def test_the_processor_time_of_a_worker_is_read_from_outside(path: Path) -> None:
    """It tells one that computes from one that sleeps; both beat."""
    command = [sys.executable, "-c", BUSY, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def used_s() -> tuple[float, float]:
        seen = _observe("w0", path, path, now_ns=time.monotonic_ns())
        return seen.processor_s, seen.trainer_s

    with subprocess.Popen(command, **pipes) as child:  # type: ignore[call-overload]
        try:
            child.stdout.readline()
            before_s, before_trainer_s = used_s()
            child.stdin.write("help\n")
            child.stdin.flush()
            until(lambda: used_s()[0] > before_s + 0.2, "processor time of the process")
            # A helper that spins must not make a dead training thread look alive.
            assert used_s()[1] < before_trainer_s + 0.1
            child.stdin.write("\n")
            child.stdin.flush()
            until(lambda: used_s()[1] > before_trainer_s + 0.2, "processor time of the trainer")
        finally:
            child.kill()


HELD = """
import ctypes, sys
from workers.parent_death import end_with_parent
from workers.telemetry import ProgressRecord

end_with_parent()
record = ProgressRecord.create(sys.argv[1], worker="w0")
print("ready", flush=True)
ctypes.PyDLL(None).usleep(900_000_000)
"""


def test_a_held_interpreter_differs_from_a_process_in_which_nothing_runs(path: Path) -> None:
    """Neither beats nor uses processor time; the one may be well, the other stands still."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HELD, str(path)], stdout=pipe) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()

            def seen() -> WorkerReport:
                return _observe("w0", path, path, now_ns=time.monotonic_ns())

            until(lambda: seen().beat_age_s > 0.5, "a beat that is late")
            runs = seen().beater_runs
            assert runs > 0
            until(lambda: seen().beater_runs > runs + 10, "a thread that waits for the lock")
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)  # its last thread stands: the main one stops first
            assert seen().os_state == "T"
            runs, since_s = seen().beater_runs, seen().beat_age_s
            until(lambda: seen().beat_age_s > since_s + 0.2, "time")
            assert seen().beater_runs == runs
        finally:
            child.kill()
