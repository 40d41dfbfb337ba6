"""Stacks of processes that are stuck in ten ways, each in one line that must be shown."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ucp_core.storage import open_store
from workers.telemetry import (
    Evidence,
    Subject,
    copies,
    kernel_facts,
    stacks_path,
    take_stacks,
    write_stacks,
)

#: Code that a process hangs in, by name; `busy` and `regex` compute, `held` keeps the interpreter.
HANGS = {
    "sleep": "time.sleep(1000)",
    "lock": "taken.acquire()",
    "queue": "queue.Queue().get()",
    "event": "threading.Event().wait()",
    "pipe": "os.read(os.pipe()[0], 1)",
    "socket": "pair = socket.socketpair(); pair[0].recv(1)",
    "child": "subprocess.run(['cat'])",
    "held": "ctypes.PyDLL(None).usleep(900_000_000)",
    "busy": "exec('while True: pass')",
    "regex": "re.match('(a+)+$', 'a' * 60 + 'b')",
}
SCRIPT = """
import ctypes, os, queue, re, socket, subprocess, threading, time

taken = threading.Lock()
taken.acquire()

def train():
    {hang}  # the line that hangs

threading.Thread(target=train, daemon=True).start()
threading.Event().wait()
"""
FORKS = """
import os, runpy, sys
from pathlib import Path
from workers.telemetry import offer_stacks, stacks_path
from workers.parent_death import end_with_parent

for name in sys.argv[2:]:
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        os.read(read, 1)
        print(pid, flush=True)
        continue
    end_with_parent()
    offer_stacks(stacks_path(Path(sys.argv[1]), name))
    os.close(write)
    runpy.run_path(f"{sys.argv[1]}/hangs_in_{name}.py")
sys.stdin.read()
"""
RUNS = """
import sys, threading
from pathlib import Path
from workers.telemetry import offer_stacks

offer_stacks(Path(sys.argv[1]))

def deep(n):
    return deep(n - 1) if n else None

def train():
    while True:
        deep(300)

for _ in range(3):
    threading.Thread(target=train, daemon=True).start()
print("trains", flush=True)
sys.stdin.read()
"""
FENCED = """
import sys
from pathlib import Path
from workers.telemetry import offer_stacks, write_stacks

file = offer_stacks(Path(sys.argv[1]))

def hangs():
    write_stacks(file)

def leaves():
    print("left", flush=True)
    sys.stdin.read()

hangs()
leaves()
"""
HANGING = "the line that hangs"
WAIT_S_MAX = 60.0


@contextmanager
def started(script: str, path: Path) -> Iterator[Subject]:
    """Run a script that offers its stacks at ``path``; yield it once it has printed a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield Subject("w1", process.pid, path)
        assert process.poll() is None
        process.stdin.close()


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[dict[str, Subject]]:
    """Processes that hang in a thread of theirs, as a trainer does."""
    for name, hang in HANGS.items():
        (tmp_path / f"hangs_in_{name}.py").write_text(SCRIPT.replace("{hang}", hang))
    command = [sys.executable, "-c", FORKS, str(tmp_path), *HANGS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in HANGS]
        paths = [stacks_path(tmp_path, name) for name in HANGS]
        yield {
            name: Subject(name, pid, path)
            for name, pid, path in zip(HANGS, pids, paths, strict=True)
        }
        # One by one: those that keep the interpreter do not see that their parent ends.
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.kill()


def _line_of(name: str, folder: Path) -> int:
    lines = (folder / f"hangs_in_{name}.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, start=1) if HANGING in line)


def test_ten_kinds_of_hang_show_the_line_that_hangs(
    stuck: dict[str, Subject], tmp_path: Path
) -> None:
    """A debugger would need rights, and would stop the process; a thread of its own the lock."""
    lines = {
        name: f'hangs_in_{name}.py", line {_line_of(name, tmp_path)} in train' for name in HANGS
    }
    end_s = time.monotonic() + WAIT_S_MAX
    missing = set(HANGS)
    while missing:
        # One may only be on its way to the line, and lose the interpreter before it answers.
        told = take_stacks(stuck.values(), 2.0)
        missing = {name for name, line in lines.items() if line not in told[name]}
        assert time.monotonic() < end_s, [told[name] for name in missing]

    # Asked again, it writes new stacks, and only those.
    again = take_stacks([stuck["sleep"]], WAIT_S_MAX)["sleep"]
    assert again.count(" in train\n") == 1


def test_the_kernel_tells_of_a_process_that_cannot_write(
    stuck: dict[str, Subject], tmp_path: Path
) -> None:
    """A stopped process runs no handler, and a dead one has left what it wrote when it died."""
    stopped, died, gone = stuck["sleep"], stuck["queue"], stuck["lock"]
    # Stacks of an earlier incident say nothing of this one.
    assert " in train" in take_stacks(stuck.values(), WAIT_S_MAX)["lock"]
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(died.pid, signal.SIGSEGV)
    os.kill(gone.pid, signal.SIGKILL)
    end_s = time.monotonic() + WAIT_S_MAX
    while any("zombie" not in kernel_facts(each.pid) for each in (died, gone)):
        assert time.monotonic() < end_s
        time.sleep(0.01)

    begin_s = time.monotonic()
    stacks = take_stacks([stopped, died, gone], WAIT_S_MAX)

    assert time.monotonic() - begin_s < WAIT_S_MAX / 2, "it waited for who writes nothing"
    assert "state T (stopped)" in stacks["sleep"]
    assert stacks["sleep"].count("\nthread ") >= 2
    assert "Fatal Python error: Segmentation fault" in stacks["queue"]
    assert "state Z (zombie)" in stacks["lock"]
    assert " in train" not in stacks["lock"] + stacks["sleep"]

    paths = {"sleep": tmp_path / "hangs_in_sleep.py", "lock": tmp_path / "none"}
    told = Evidence(stacks=stacks, rings=copies(paths))
    store, path = open_store(str(tmp_path / "run"))
    told.store(store, f"{path}/incidents/0003")
    assert (tmp_path / "run/incidents/0003/stacks/sleep.txt").read_text() == stacks["sleep"]
    copy = tmp_path / "run/incidents/0003/rings/sleep.ring"
    assert copy.read_bytes() == (tmp_path / "hangs_in_sleep.py").read_bytes()


def test_a_fenced_process_has_written_where_it_was_before(tmp_path: Path) -> None:
    """Later stacks do not show it; in the next attempt a request fills the empty file."""
    with started(FENCED, stacks_path(tmp_path, "w1")) as subject:
        at_fence = take_stacks([subject], WAIT_S_MAX)["w1"]
        later = take_stacks([subject], WAIT_S_MAX)["w1"]

    assert " in hangs" in at_fence
    assert " in leaves" not in at_fence
    assert " in leaves" in later


def test_a_process_that_runs_survives_requests_for_its_stacks(tmp_path: Path) -> None:
    """A signal whose handler reads the frames of running threads ends it at once."""
    with started(RUNS, stacks_path(tmp_path, "w1")) as subject:
        taken = [take_stacks([subject], WAIT_S_MAX)["w1"] for _ in range(30)]

    assert all(" in deep\n" in one or " in train\n" in one for one in taken)


def test_a_full_disk_keeps_no_process_from_obeying_a_fence() -> None:
    """The fence comes after the stacks, so an error there would leave the attempt alive."""
    with Path("/dev/full").open("wb") as full:
        write_stacks(full.fileno())


def test_a_process_without_a_handler_is_left_alone(tmp_path: Path) -> None:
    """The signal would end it: a worker that only starts, or whose script took the handler away."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        told = take_stacks([Subject("w1", process.pid, tmp_path / "w1.stacks")], WAIT_S_MAX)
        assert process.poll() is None
        assert f"process {process.pid}: state " in told["w1"]
