"""Take evidence of a worker from outside: its stacks, even if it hangs, and its ring.

A process writes its stacks on request, or before it obeys a fence. A thread of it waits at a pipe
for requests and writes the stacks while it holds the interpreter lock. If another thread keeps that
lock, a signal makes ``faulthandler`` write them without it. The signal is the second choice: its
handler reads the frames of other threads, and if these run, the process dies of SIGSEGV, mostly at
the first or second signal (Python 3.11). A stopped or frozen process writes nothing; the kernel
reports on it instead.

``workers.process`` offers stacks, and ``workers.keeper`` takes them.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ucp_core.storage import Store, join
from workers.protocol import GONE
from workers.telemetry.processes import process_state

#: A real-time signal: frameworks and schedulers use SIGUSR1 and SIGUSR2, and glibc the first ones.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 7

_SUFFIX: Final = ".stacks"
_REQUESTS_SUFFIX: Final = ".requests"
#: A thread that has read a request but has not written for this long cannot get the interpreter
#: lock.
_LOCKED_S: Final = 0.2
#: A dump takes milliseconds. It is complete if its size did not change in two more looks.
_LOOK_S: Final = 0.002
_SETTLED_LOOKS: Final = 2
#: Header of the stacks that a process wrote before it obeyed a fence.
_BEFORE: Final = b"Before the fence:\n\n"
#: Maximum number of threads to list individually; Ray alone has some dozens.
_NUM_THREADS_MAX: Final = 256
#: The folders that an incident has.
STACKS: Final = "stacks"
RINGS: Final = "rings"
#: States in which the kernel holds a process, so that it writes nothing.
_HELD: Final = frozenset("Tt")


class Subject(NamedTuple):
    """A worker whose stacks to take."""

    worker: str
    pid: int  #: The worker's process; 0 if unknown.
    path: Path  #: The file of ``offer_stacks``.


def stacks_path(directory: Path, worker: str) -> Path:
    """Return the file to which ``worker`` writes its stacks."""
    return directory / (worker + _SUFFIX)


def offer_stacks(path: Path) -> int:
    """Make this process append the stacks of all threads to ``path`` on request.

    It also does so on a fatal fault, such as a segmentation fault. Return the file, for
    ``write_stacks``. The file is emptied when an attempt begins.
    """
    # The file stays open while the process lives. Readers truncate it, so it must be open for
    # appending.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(_requests_path(path), 0o600)
    # The pipe is opened in both directions, because without a writer it would be at its end.
    requests = os.open(_requests_path(path), os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(target=_answer, args=(requests, file), daemon=True, name="stacks").start()
    return file


def forget_stacks(path: Path) -> None:
    """Remove the files of a process that is gone."""
    path.unlink(missing_ok=True)
    _requests_path(path).unlink(missing_ok=True)


def _requests_path(path: Path) -> Path:
    return path.with_suffix(_REQUESTS_SUFFIX)


def _answer(requests: int, file: int) -> None:
    while os.read(requests, 1):
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file, all_threads=True)


def write_stacks(file: int) -> None:
    """Write the stacks of this process now, because after it obeys a fence they hide the hang."""
    # If the disk is full, there is no evidence, but the process must still obey the fence.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, _BEFORE)
        faulthandler.dump_traceback(file, all_threads=True)


def take_stacks(subjects: Iterable[Subject], within_s: float) -> dict[str, str]:
    """Return the stacks of workers by name, or the kernel's report on workers that write none.

    Wait at most ``within_s`` until all have written.
    """
    subjects = tuple(subjects)
    with contextlib.ExitStack() as opened:
        waited = {each.worker: (each, one) for each in subjects if (one := _ask(each, opened))}
        end_s = time.monotonic() + within_s
        seen: dict[str, tuple[int, int]] = {}
        while waited and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            for worker, (subject, request) in list(waited.items()):
                num_bytes, num_looks = _size(subject.path), 0
                if num_bytes and seen.get(worker, (0, 0))[0] == num_bytes:
                    num_looks = seen[worker][1] + 1
                seen[worker] = (num_bytes, num_looks)
                if num_looks == _SETTLED_LOOKS:
                    del waited[worker]
                elif not num_bytes:
                    request.insist()
    return {each.worker: _told(each) for each in subjects}


class _Request:
    """A request for the stacks of a process. The caller closes ``pipe``, its writing end."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe
        # If an old request is not read yet, its thread waits for the interpreter lock.
        self._read_at_s = time.monotonic() if self._num_unread() else None
        self._has_signalled = False

    def send(self) -> None:
        """Ask the thread of the process that waits for requests."""
        os.write(self._pipe, b"?")

    def insist(self) -> None:
        """Send the signal if the thread has read the request but cannot run.

        If it has not read the request yet, the process may run, and then the signal could end it.
        """
        now_s = time.monotonic()
        if self._read_at_s is None:
            self._read_at_s = None if self._num_unread() else now_s
        elif now_s - self._read_at_s >= _LOCKED_S and not self._has_signalled:
            self._has_signalled = True
            if _handles_signal(self._pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, STACKS_SIGNAL)

    def _num_unread(self) -> int:
        answer = fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, sys.byteorder)


def _ask(subject: Subject, opened: contextlib.ExitStack) -> _Request | None:
    """Request the stacks, if the process will write; drop late output of an older request.

    Stacks that it wrote before it obeyed a fence are kept: later stacks do not show where it was.
    """
    if not subject.pid or process_state(subject.pid).letter in GONE | _HELD:
        return None
    with contextlib.suppress(OSError):
        # This fails if no process reads from the pipe.
        pipe = os.open(_requests_path(subject.path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        opened.callback(os.close, pipe)
        request = _Request(subject.pid, pipe)
        if not subject.path.read_bytes().startswith(_BEFORE):
            os.truncate(subject.path, 0)
            request.send()
        return request
    return None


def _handles_signal(pid: int) -> bool:
    """Return whether the process has a handler. Without one the signal would end the process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _told(subject: Subject) -> str:
    head = f"{subject.worker}, process {subject.pid}\n\n"
    with contextlib.suppress(OSError):
        if written := subject.path.read_text(errors="replace"):
            # From now on, the file only holds dumps that are written later.
            os.truncate(subject.path, 0)
            return head + written
    if not subject.pid:
        return head + "The process is unknown.\n"
    return head + "It wrote no stacks. The kernel says:\n\n" + kernel_facts(subject.pid)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def kernel_facts(pid: int) -> str:
    """Return the state of a process and of each thread, a line each, for people.

    It needs no help from the process, so it works while the process is stopped or frozen. ``wchan``
    is the kernel function in which a thread sleeps, ``syscall`` the number and arguments of its
    system call; both are omitted if the kernel does not report them.
    """
    process = Path(f"/proc/{pid}")
    if not process.exists():
        return f"There is no process {pid}.\n"
    lines = [f"process {pid}: state {_state(process)}"]
    with contextlib.suppress(OSError):
        threads = sorted(int(each.name) for each in (process / "task").iterdir())
        lines += [_thread(process / "task" / str(each)) for each in threads[:_NUM_THREADS_MAX]]
    return "\n".join(lines) + "\n"


def _thread(thread: Path) -> str:
    name = _first_line(thread / "comm")
    facts = {"wchan": _first_line(thread / "wchan"), "syscall": _first_line(thread / "syscall")}
    told = "".join(f", {what} {fact}" for what, fact in facts.items() if fact not in {"", "0"})
    return f"thread {thread.name} {name}: state {_state(thread)}{told}"


def _state(process: Path) -> str:
    status = _read(process / "status")
    return next((x[6:].strip() for x in status.splitlines() if x.startswith("State:")), "gone")


def _first_line(path: Path) -> str:
    return next(iter(_read(path).splitlines()), "").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Stacks and rings of the workers of one node, by worker."""

    stacks: Mapping[str, str]
    rings: Mapping[str, bytes]

    def store(self, store: Store, folder: str) -> None:
        """Write a file for each worker's stacks and ring below ``folder``."""
        for worker, text in self.stacks.items():
            path = join(folder, STACKS, f"{worker}.txt")
            store.write_atomic(path, text.encode(), fsync=False)
        for worker, ring in self.rings.items():
            store.write_atomic(join(folder, RINGS, f"{worker}.ring"), ring, fsync=False)


def copies(rings: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the content of the existing rings, by worker. Reading a large ring takes 10 ms."""
    found: dict[str, bytes] = {}
    for worker, path in rings.items():
        with contextlib.suppress(OSError):
            found[worker] = path.read_bytes()
    return found
