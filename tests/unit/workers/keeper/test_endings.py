"""What is known of how a process ended, by another one than its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.snapshots import eventually
from workers.keeper.endings import Endings, _status_kept
from workers.protocol import Ending

WAIT_S_MAX = 60.0
GROUPS = Path("/sys/fs/cgroup/memory")


def end_of(code: str, folder: Path, *, before: str = "") -> tuple[Ending, int]:
    """Return how a process that runs ``code`` ended, and its id; nobody asks for its status."""
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
        ("print('a\\nb\\nc', flush=True); os._exit(1)", "exit code 1; it said last: b / c"),
        (
            "print('out', flush=True); print('err', file=sys.stderr, flush=True); os._exit(1)",
            "exit code 1; it said last: err",
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


def test_the_kernel_s_kill_for_want_of_memory_is_told_from_others(
    group: Path, tmp_path: Path
) -> None:
    """Both are SIGKILL, and what to do about them differs."""
    join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"

    found, pid = end_of("bytearray(256 << 20)", tmp_path, before=join)

    assert found.is_out_of_memory
    assert found.text == (
        f"process {pid} was killed for want of memory: its control group may have 0.06 GiB"
    )


def test_of_a_process_that_was_gone_before_only_its_files_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died while it started, before it had a progress record."""
    (tmp_path / "worker-ab-01-77.err").write_text("libfoo.so: cannot open shared object file\n")
    monkeypatch.setattr(
        "workers.keeper.endings._outputs", lambda _: (tmp_path / "worker-cd-01-5.err",)
    )

    assert Endings().of(77, 0.0).text == (
        "process 77 died; it said last: libfoo.so: cannot open shared object file"
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
