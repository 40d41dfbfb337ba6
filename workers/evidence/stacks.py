"""The stacks of a process, which it writes itself: on a signal, or before it obeys a fence.

``faulthandler`` writes within the signal handler, so it needs neither the interpreter lock nor the
stuck thread, nor a debugger. A stopped or frozen process writes nothing; the kernel reports on it
instead.

Counterparts: ``workers.process`` offers stacks, ``workers.keeper`` takes them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from workers.evidence.kernel import kernel_facts
from workers.protocol import GONE
from workers.records import process_state

#: A real-time signal: frameworks and schedulers use SIGUSR1 and SIGUSR2, and glibc the first ones.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 7

_SUFFIX: Final = ".stacks"
#: A dump takes milliseconds. It is complete if it did not grow between two looks.
_LOOK_S: Final = 0.002
_SETTLED_LOOKS: Final = 2
#: Header of the stacks that a process wrote before it obeyed a fence.
_BEFORE: Final = b"Before the fence:\n\n"
#: The kernel holds processes in these states: they write nothing.
_HELD: Final = frozenset("Tt")


class Subject(NamedTuple):
    """A worker whose stacks are wanted."""

    worker: str
    pid: int  #: Its process; 0 if unknown.
    path: Path  #: The file of ``offer_stacks``.


def stacks_path(directory: Path, worker: str) -> Path:
    """Return the file to which ``worker`` writes its stacks."""
    return directory / (worker + _SUFFIX)


def offer_stacks(path: Path) -> int:
    """Make this process append the stacks of all threads to ``path`` on ``STACKS_SIGNAL``.

    It also does so on a fatal fault, such as a segmentation fault. Returns the file, for
    ``write_stacks``; it is emptied when an attempt begins.
    """
    # It stays open while the process lives. Readers truncate it, so it must be opened for
    # appending.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
    return file


def write_stacks(file: int) -> None:
    """Write the stacks of this process now: after it obeys a fence, no thread is where it hung."""
    # A full disk costs the evidence, but must not keep a process from obeying.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, _BEFORE)
        faulthandler.dump_traceback(file, all_threads=True)


def take_stacks(subjects: Iterable[Subject], within_s: float) -> dict[str, str]:
    """Return the stacks of workers by name, and the kernel's report on those that write none.

    Blocks until all have written, at most for ``within_s``.
    """
    subjects = tuple(subjects)
    waited = {each.worker: each.path for each in subjects if _ask(each)}
    end_s = time.monotonic() + within_s
    seen: dict[str, tuple[int, int]] = {}
    while waited and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        for worker, path in list(waited.items()):
            num_bytes, num_looks = _size(path), 0
            if num_bytes and seen.get(worker, (0, 0))[0] == num_bytes:
                num_looks = seen[worker][1] + 1
            seen[worker] = (num_bytes, num_looks)
            if num_looks == _SETTLED_LOOKS:
                del waited[worker]
    return {each.worker: _told(each) for each in subjects}


def _ask(subject: Subject) -> bool:
    """Send the signal, if the process will write; drop late output of an older one.

    Stacks that it wrote before it obeyed a fence are kept: later stacks do not show where it was.
    """
    if not subject.pid or process_state(subject.pid).letter in GONE:
        return False
    if process_state(subject.pid).letter in _HELD or not _handles_signal(subject.pid):
        return False
    with contextlib.suppress(OSError):
        if subject.path.read_bytes().startswith(_BEFORE):
            return True
        os.truncate(subject.path, 0)
        os.kill(subject.pid, STACKS_SIGNAL)
        return True
    return False


def _handles_signal(pid: int) -> bool:
    """Return whether the process has a handler: without one the signal would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _told(subject: Subject) -> str:
    head = f"{subject.worker}, process {subject.pid}\n\n"
    with contextlib.suppress(OSError):
        if written := subject.path.read_text(errors="replace"):
            # The next dump there was written after that time.
            os.truncate(subject.path, 0)
            return head + written
    if not subject.pid:
        return head + "Nothing is known of its process.\n"
    return head + "It wrote no stacks. The kernel says:\n\n" + kernel_facts(subject.pid)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
