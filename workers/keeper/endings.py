"""How the trainers of a node ended: their exit status, and what they said last.

Only its parent is told how a process ended, and Ray's raylet does not pass it on. Linux 6.15 shows
it to whoever holds a descriptor of the process. Before, the kernel shows it to every process of the
same user (``/proc/PID/stat``) until the parent has asked, which is a matter of milliseconds. A
thread waits for that moment, and is late where the processors are busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.protocol import Ending
from workers.records import process_state

#: At most so much of a process's last words is told.
_LINES_MAX, _LINE_CHARS = 2, 160
_TAIL_BYTES: Final = 4096
_OUT, _ERR = 1, 2
#: Version 1 of control groups writes about 2^63 for none.
_NO_LIMIT: Final = 1 << 60
_CGROUPS: Final = Path("/sys/fs/cgroup")
#: ``PIDFD_GET_INFO`` of linux/pidfd.h with its first structure: what is asked for comes first, the
#: status last.
_GET_INFO: Final = 0xC040FF0B
_INFO: Final = struct.Struct("=Q52xi")
_INFO_EXIT: Final = 1 << 3


@dataclass(frozen=True, slots=True)
class _Process:
    """A living process: where it writes, and whose memory it shares."""

    pid: int
    outputs: tuple[Path, ...]
    group: Path | None
    num_killed: int


class Endings:
    """Watches the processes of a node's trainers from their start on."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._followed: dict[int, _Process] = {}
        self._by_descriptor: dict[int, int] = {}
        self._told: dict[int, Ending] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake[0], select.POLLIN)

    def follow(self, pid: int) -> None:
        """Watch a process from now on; does nothing if it is watched, or gone."""
        with self._changed:
            if pid in self._followed or pid in self._told:
                return
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return
            group = _memory_group(pid)
            self._followed[pid] = _Process(pid, _outputs(pid), group, _num_killed(group))
            self._by_descriptor[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
        os.write(self._wake[1], b"\0")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="endings", daemon=True)
            self._thread.start()

    def of(self, pid: int, wait_s: float) -> Ending:
        """Return how ``pid`` ended, as far as that is known within ``wait_s``."""
        with self._changed:
            if pid in self._followed:
                self._changed.wait_for(lambda: pid in self._told, wait_s)
            if pid in self._told:
                return self._told[pid]
        # It was gone before anybody followed it.
        files = (path for own in _outputs(os.getpid()) for path in own.parent.glob(f"*-{pid}.*"))
        return Ending(_described(pid, None, "", _lines(sorted(files))))

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(descriptor, _TAIL_BYTES)
                else:
                    self._note_end(descriptor)

    def _note_end(self, descriptor: int) -> None:
        process = self._followed[self._by_descriptor[descriptor]]
        # At once: its parent asks, too, and then nothing is left of it.
        status = process_state(process.pid).exit_status
        status = _status_kept(descriptor) if status is None else status
        self._poll.unregister(descriptor)
        os.close(descriptor)
        shortage = _shortage(process, status)
        text = _described(process.pid, status, shortage, _lines(process.outputs))
        with self._changed:
            del self._followed[process.pid], self._by_descriptor[descriptor]
            self._told[process.pid] = Ending(text, bool(shortage))
            self._changed.notify_all()


def _status_kept(descriptor: int) -> int | None:
    """Return the exit status of a process whose parent has asked for it; None if it is lost."""
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    known, status = _INFO.unpack(info)
    return status if known & _INFO_EXIT else None


def _described(pid: int, status: int | None, shortage: str, lines: list[str]) -> str:
    how = f"process {pid} died"
    if shortage:
        how = f"process {pid} was killed for want of memory: {shortage}"
    elif status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in set(signal.Signals)
        how = (
            f"process {pid} died of {signal.Signals(number).name if known else f'signal {number}'}"
        )
    elif status is not None:
        how = f"process {pid} ended with exit code {os.WEXITSTATUS(status)}"
    return f"{how}; it said last: {' / '.join(lines)}" if lines else how


def _shortage(process: _Process, status: int | None) -> str:
    """Return which memory ran out, if the kernel killed the process for that; else ""."""
    if status != signal.SIGKILL or _num_killed(process.group) <= process.num_killed:
        return ""
    if process.group is None:
        return "the machine had none left"
    return f"its control group may have {_limit_bytes(process.group) / (1 << 30):.2f} GiB"


def _num_killed(group: Path | None) -> int:
    """Return how many processes the kernel has killed for want of memory so far."""
    if group is None:
        texts = [_read(Path("/proc/vmstat"))]
    else:
        texts = [_read(group / name) for name in ("memory.events", "memory.oom_control")]
    rows = [row.split() for text in texts for row in text.splitlines()]
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill")  # noqa: PLR2004


def _memory_group(pid: int) -> Path | None:
    """Return the control group with the memory limit that holds for ``pid``; None if none does."""
    for row in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, place = row.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        found = root / place.lstrip("/")
        for group in (found, *found.parents):
            if _limit_bytes(group):
                return group
            if group == root:
                break
    return None


def _limit_bytes(group: Path) -> int:
    """Return the limit of a control group; 0 if it has none."""
    texts = (_read(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return next((size for text in texts if text.isdigit() and (size := int(text)) < _NO_LIMIT), 0)


def _outputs(pid: int) -> tuple[Path, ...]:
    """Return the files that a process writes its output to, its errors first."""
    found = []
    for number in (_ERR, _OUT):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{pid}/fd/{number}").readlink()
            if path.is_file() and path not in found:
                found.append(path)
    return tuple(found)


def _lines(paths: Iterable[Path]) -> list[str]:
    """Return the last lines in the first of ``paths`` that has some."""
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = list(_said(file.read().decode(errors="replace")))
            if lines:
                return lines[-_LINES_MAX:]
    return []


def _said(text: str) -> Iterator[str]:
    for line in text.splitlines():
        # Ray writes lines for itself that begin so.
        if line.strip() and not line.startswith(":"):
            yield line.strip()[:_LINE_CHARS]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
