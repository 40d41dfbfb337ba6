"""Facts about how a process ended, found by another process than its parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.snapshots import eventually
from workers.keeper.endings import Endings, _Process, _shortage, _status_kept
from workers.protocol import Ending

WAIT_S_MAX = 60.0
GROUPS = Path("/sys/fs/cgroup/memory")


def end_of(code: str, folder: Path, *, before: str = "") -> tuple[Ending, int]:
    """Return how a process that runs ``code`` ended, and its id; no parent asks for its status."""
    endings = Endings()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        began = f"import os, signal, sys\n{before}\nopen({str(folder / 'began')!r}, 'w')"
        waiting = f"{began}\nsys.stdin.readline()\n{code}"
        process = subprocess.Popen(
            [sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=out, stderr=err
        )
    assert eventually((folder / "began").exists)
    endings.follow(process.pid)
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.close()
    found = endings.of(process.pid, WAIT_S_MAX)
    process.wait()
    return found, process.pid


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("os._exit(7)", "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL"),
        ("os.abort()", "died of SIGABRT"),
        ("os.kill(os.getpid(), 40)", "died of signal 40"),
        ("print('a\\nb\\nc', flush=True); os._exit(1)", "exit code 1; its last output: b / c"),
        # A killed process reports nothing: these are earlier results.
        ("print('an argument', flush=True); os.kill(os.getpid(), 9)", "died of SIGKILL"),
        (
            "print('Error: no room\\nI retry', file=sys.stderr); os.kill(os.getpid(), 9)",
            "died of SIGKILL; its last output: Error: no room",
        ),
        (
            "print('Error: once\\nstep 1\\nstep 2', file=sys.stderr); os.kill(os.getpid(), 9)",
            "died of SIGKILL",
        ),
        (
            "print('Error', file=sys.stderr); os.utime(2, (1, 1)); os.kill(os.getpid(), 9)",
            "died of SIGKILL",
        ),
        (f"sys.exit('Error: {'long ' * 40}')", f"its last output: Error: {'long ' * 29}long ..."),
        (
            "print('out', flush=True); print('err', file=sys.stderr, flush=True); os._exit(1)",
            "exit code 1; its last output: err",
        ),
        ("raise ValueError('why')", "in <module> / ValueError: why"),
    ],
)  # fmt: skip
def test_the_status_and_the_last_words_are_known(code: str, told: str, tmp_path: Path) -> None:
    """Ray says of all of them that the connection ended, with three possible causes."""
    found, pid = end_of(code, tmp_path)

    assert found.text.startswith(f"process {pid} ")
    assert found.text.endswith(told)
    assert not found.is_out_of_memory


#: The output of a worker of Ray 2.60 when native code aborts.
ABORTED = """\
:job_id:01000000
step 7 has a loss of 0.5
loss.cc:12: void f(): Assertion `x > 0' failed.
*** SIGABRT received at time=1795925224 on cpu 0 ***
PC: @     0x7f9c426a8eec  (unknown)  (unknown)
    @     0x7f9c4265a050   66707664  (unknown)
[2026-11-29 04:07:04,684 E 137 137] logging.cc:474: *** SIGABRT received at time=17 on cpu 0 ***
[2026-11-29 04:07:04,685 E 137 137] logging.cc:474: PC: @     0x7f9c426a8eec  (unknown)
[2026-11-29 04:07:04,685 E 137 137] logging.cc:474:     @     0x7f9c4265a050   66707664
Fatal Python error: Aborted

Stack (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_ops.py", line 1 in __call__
  File "/scripts/train.py", line 7 in train
  File "/scripts/train.py", line 30 in <module>

Extension modules: msgpack._cmsgpack, google._upb._message (total: 2)
"""
TORCH = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check at c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f0000000000 in /x/libc10.so)
/lib/libc.so.6(+0x3c460) [0x7f1234567890]
"""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            ABORTED,
            (
                'File "/scripts/train.py", line 7 in train / '
                "loss.cc:12: void f(): Assertion `x > 0' failed."
            ),
        ),
        (TORCH, "what():  CUDA error: an illegal memory access was encountered"),
    ],
)
def test_an_abort_is_reported_by_its_error_and_not_by_addresses(
    written: str, told: str, tmp_path: Path
) -> None:
    """The last lines are frames of native code, which say nothing to a reader of the terminal."""
    code = f"sys.stderr.write({written!r}); sys.stderr.flush(); os.abort()"

    found, pid = end_of(code, tmp_path)

    assert found.text == f"process {pid} died of SIGABRT; its last output: {told}"


def test_a_process_that_has_not_ended_has_no_ending() -> None:
    """Ray may say that it died before the kernel does, and "it died" would be all that is kept."""
    endings = Endings()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        endings.follow(process.pid)
        early = endings.of(process.pid, 0.0)
        process.kill()
        told = endings.of(process.pid, WAIT_S_MAX)

    assert early.text == ""
    assert told.text == f"process {process.pid} died of SIGKILL"


def test_a_signal_is_known_before_the_process_has_given_back_its_memory() -> None:
    """That takes a second for a large trainer, and the recovery waits for the answer."""
    code = "a = bytearray(b'1') * (1 << 28)\nprint(flush=True)\ninput()"
    endings = Endings()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        endings.follow(process.pid)
        # It has a status, and has not ended.
        assert endings.of(process.pid, 0.1).text == ""
        process.kill()
        assert endings.of(process.pid, WAIT_S_MAX).text == f"process {process.pid} died of SIGKILL"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may have 64 MiB."""
    made = GROUPS / f"everstep-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield made
    made.rmdir()


def test_the_kernels_kill_for_want_of_memory_differs_from_others(
    group: Path, tmp_path: Path
) -> None:
    """Both are SIGKILL, and what to do about them differs."""
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"

    found, pid = end_of("bytearray(256 << 20)", tmp_path, before=join)

    assert found.is_out_of_memory
    assert found.text == (
        f"process {pid} was killed because memory ran out: its control group {group} may have "
        "64 MiB, and used 64 MiB"
    )


def test_a_kill_that_came_long_before_is_no_cause(tmp_path: Path) -> None:
    """The kernel only counts its kills: one of another process in the hour before is in there."""
    (tmp_path / "memory.max").write_text(f"{64 << 20}")
    events = tmp_path / "memory.events"
    process = _Process(1, (), tmp_path)
    told = []
    for num_killed in (3, 4, 4, 4):
        events.write_text(f"oom 9\noom_kill {num_killed}\n")
        told.append(bool(_shortage(process, signal.SIGKILL)))
        process = process.refreshed()

    # The first look knows of no count before.
    assert told == [True, True, True, False]


def test_only_the_files_of_a_process_that_was_gone_before_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died while it started, before it had a progress record."""
    pid = 1 << 23  # more than any system has
    (tmp_path / f"worker-ab-01-{pid}.err").write_text("libfoo.so: cannot open shared object file\n")
    monkeypatch.setattr(
        "workers.keeper.endings._outputs", lambda _: (tmp_path / "worker-cd-01-5.err",)
    )

    assert Endings().of(os.getpid(), 0.0).text == "", "it lives"
    assert Endings().of(pid, 0.0).text == (
        f"process {pid} died; its last output: libfoo.so: cannot open shared object file"
    )


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15), reason="needs Linux 6.15"
)
def test_a_status_that_the_parent_has_asked_for_is_known() -> None:
    """The parent is faster than a keeper where trainers keep the processors busy."""
    shell = "sleep 600 & echo $!; wait $!; echo gone; read _"
    with subprocess.Popen(
        ["/bin/sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        held = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert parent.stdout.readline() == "gone\n"
        status = _status_kept(held)
        os.close(held)
        parent.kill()

    assert status is not None
    assert os.WTERMSIG(status) == signal.SIGKILL
