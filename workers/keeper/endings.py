"""Find how the trainers of a node ended: their exit status and their last output.

The kernel reports only to the parent how a process ended, and Ray's raylet does not pass it on.
Linux 6.15 reports it to any holder of a descriptor of the process. Older kernels show it to every
process of the same user (``/proc/PID/stat``) until the parent has read it, a few milliseconds
later. A thread waits for that moment, and is late if the processors are busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from workers.keeper.arena_table import meminfo_bytes
from workers.protocol import GONE, Ending
from workers.telemetry import process_state

#: How many lines of a process's last output to quote, and how many characters of each.
_LINES_MAX, _LINE_CHARS = 2, 160
#: Earlier output of a killed process has another cause: the process had no time to report the kill.
_RECENT_S: Final = 5.0
_TAIL_BYTES: Final = 1 << 16
_OUT, _ERR = 1, 2
#: Version 1 of control groups writes about 2^63 if there is no limit.
_NO_LIMIT: Final = 1 << 60
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OOM_KILLS: Final = ("memory.events", "memory.oom_control")
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_PEAKS: Final = ("memory.peak", "memory.max_usage_in_bytes", "memory.current")
#: A process may join a control group late, and only a kill of these last seconds counts as its own.
_REFRESH_S: Final = 5.0
#: Period of checks of a process whose end is awaited.
_LOOK_S: Final = 0.005
#: Lines that glog, faulthandler and torch write after an error: frames of native code, and
#: headings.
_FRAMES: Final = re.compile(
    r"@ +0x[0-9a-f]|^#\d|^frame #|\[0x[0-9a-f]+\]$|\*\*\* (SIG|Aborted|Check failure)|PC: @"
    r"|^C\+\+ Cap|^Exception raised from|^Extension modules:|^(Current t|T)hread 0x"
    r"|^Stack \(most|^Fatal Python error: (Abort|Segm|Bus|Ill|Float)|^[\^~]+$"
)
_OURS: Final = re.escape(str(Path(__file__).parents[1]))
_PLACE: Final = re.compile(rf'File "(?!<frozen|[^"]*/(site-packages|lib/python\d)|{_OURS})')
_FIRST_IS_NEWEST: Final = "most recent call first"
_ERRORS: Final = re.compile(
    r"(?i)error|exception|assert|fatal|fail|cannot|terminate called|what\(\):|panic|\babort"
    r"|out of memory|no such|denied|terminated|segmentation"
)
#: ``PIDFD_GET_INFO`` of linux/pidfd.h with its first structure: the request comes first, the status
#: last.
_GET_INFO: Final = 0xC040FF0B
_INFO: Final = struct.Struct("=Q52xi")
_INFO_EXIT: Final = 1 << 3


@dataclass(frozen=True, slots=True)
class _Process:
    """A living process: the files of its output, and the control group of its memory."""

    pid: int
    outputs: tuple[Path, ...]
    group: Path | None = None
    num_killed: int = 0
    num_killed_since: int = 0

    def refreshed(self) -> _Process:
        """Return the process with its current control group and number of kills."""
        group = _memory_group(self.pid) or self.group
        num = _num_killed(group)
        since = self.num_killed_since if group == self.group else num
        return replace(self, group=group, num_killed=since, num_killed_since=num)


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
        """Watch a process from now on; ignore one that is already watched, or gone."""
        if pid in self._followed or pid in self._told:
            return
        with self._changed:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return
            # Read the count twice: earlier kills are not news.
            self._followed[pid] = _Process(pid, _outputs(pid)).refreshed().refreshed()
            self._by_descriptor[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
        os.write(self._wake[1], b"\0")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="endings", daemon=True)
            self._thread.start()

    def of(self, pid: int, wait_s: float) -> Ending:
        """Return how ``pid`` ended, if that is known within ``wait_s``.

        The result is empty for a process that has not ended by then: it may still be freeing its
        memory.
        """
        with self._changed:
            until_s = time.monotonic() + wait_s
            while pid in self._followed or (pid not in self._told and _lives(pid)):
                status = process_state(pid).exit_status
                if pid in self._followed and status is not None:
                    # Freeing its memory may take seconds, and the recovery need not wait for that.
                    return _ending(self._followed[pid], status)
                if time.monotonic() >= until_s:
                    return Ending("")
                self._changed.wait(_LOOK_S)
            if pid in self._told:
                return self._told[pid]
        # The process was gone before this keeper followed it.
        files = (path for own in _outputs(os.getpid()) for path in own.parent.glob(f"*-{pid}.*"))
        return Ending(_described(pid, None, "", _last_words(sorted(files))))

    def _run(self) -> None:
        while True:
            ready = self._poll.poll(1e3 * _REFRESH_S)
            if not ready:
                for pid, process in list(self._followed.items()):
                    self._followed[pid] = process.refreshed()
            for descriptor, _ in ready:
                if descriptor == self._wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(descriptor, _TAIL_BYTES)
                else:
                    self._note_end(descriptor)

    def _note_end(self, descriptor: int) -> None:
        process = self._followed[self._by_descriptor[descriptor]]
        # Read it at once: it is gone when the parent has read it, too.
        status = process_state(process.pid).exit_status
        status = _status_kept(descriptor) if status is None else status
        self._poll.unregister(descriptor)
        os.close(descriptor)
        ending = _ending(process, status)
        with self._changed:
            del self._followed[process.pid], self._by_descriptor[descriptor]
            self._told[process.pid] = ending
            self._changed.notify_all()


def _lives(pid: int) -> bool:
    state = process_state(pid)
    return state.letter not in GONE and state.exit_status is None


def _status_kept(descriptor: int) -> int | None:
    """Return the exit status of a process whose parent has read it; None if it is lost."""
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    known, status = _INFO.unpack(info)
    return status if known & _INFO_EXIT else None


def _ending(process: _Process, status: int | None) -> Ending:
    shortage = _shortage(process, status)
    words = _last_words(process.outputs, is_killed=status == signal.SIGKILL)
    return Ending(_described(process.pid, status, shortage, words), bool(shortage))


def _described(pid: int, status: int | None, shortage: str, lines: list[str]) -> str:
    how = f"process {pid} died"
    if shortage:
        how = f"process {pid} was killed because memory ran out: {shortage}"
    elif status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in set(signal.Signals)
        how = (
            f"process {pid} died of {signal.Signals(number).name if known else f'signal {number}'}"
        )
    elif status is not None:
        how = f"process {pid} ended with exit code {os.WEXITSTATUS(status)}"
    return f"{how}; its last output: {' / '.join(lines)}" if lines else how


def _shortage(process: _Process, status: int | None) -> str:
    """Return which memory ran out if the kernel killed the process for it, else ""."""
    if status != signal.SIGKILL or _num_killed(process.group) <= process.num_killed:
        return ""
    if process.group is None:
        names = "MemAvailable", "MemTotal"
        free, all_of_it = (_size(meminfo_bytes(name) or 0) for name in names)
        return (
            "no limit of a control group is known, and the machine has "
            f"{free} of {all_of_it} available without it"
        )
    group, used = process.group, max(_numbers(process.group, _PEAKS), default=0)
    return (
        f"its control group {group} may have {_size(_limit_bytes(group))}, and used {_size(used)}"
    )


def _size(num_bytes: int) -> str:
    is_small = num_bytes < 1 << 30
    return f"{num_bytes / (1 << 20):.0f} MiB" if is_small else f"{num_bytes / (1 << 30):.2f} GiB"


def _num_killed(group: Path | None) -> int:
    """Return the number of processes that the kernel has killed for lack of memory."""
    if group is None:
        texts = [_read(Path("/proc/vmstat"))]
    else:
        texts = [_read(group / name) for name in _OOM_KILLS]
    rows = [row.split() for text in texts for row in text.splitlines()]
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill")  # noqa: PLR2004


def _memory_group(pid: int) -> Path | None:
    """Return the control group whose memory limit applies to ``pid``, or None."""
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
    return next((size for size in _numbers(group, _LIMITS) if size < _NO_LIMIT), 0)


def _numbers(group: Path, names: Iterable[str]) -> list[int]:
    texts = (_read(group / name) for name in names)
    return [int(text) for text in texts if text.isdigit()]


def _outputs(pid: int) -> tuple[Path, ...]:
    """Return the files that a process writes its output to, that of its errors first."""
    found = []
    for number in (_ERR, _OUT):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{pid}/fd/{number}").readlink()
            if path.is_file() and path not in found:
                found.append(path)
    return tuple(found)


def _last_words(paths: Iterable[Path], *, is_killed: bool = False) -> list[str]:
    """Return a process's output about its end, from the first of ``paths`` that has some.

    A process that was killed from outside reported nothing, unless an error came just before.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            found = path.stat()
            now_s = time.time()  # noqa: TID251  as files have it
            if is_killed and now_s - found.st_mtime > _RECENT_S:
                continue
            file.seek(max(0, found.st_size - _TAIL_BYTES))
            words = _words(file.read().decode(errors="replace"), is_killed=is_killed)
            if words or is_killed:
                # Its error output comes first. Its other output holds results.
                return words
    return []


def _words(text: str, *, is_killed: bool) -> list[str]:
    """Return the last line of an error, after the line of the script that caused it."""
    # Ray's own lines begin with a colon.
    lines = [line.strip() for line in text.splitlines() if not line.startswith(":")]
    said = [line for line in lines if line and not _FRAMES.search(line)]
    spoken = [line for line in said if not line.startswith('File "')]
    errors = [line for line in spoken[-_LINES_MAX if is_killed else 0 :] if _ERRORS.search(line)]
    places = [line for line in said if _PLACE.match(line)]
    if not errors and (is_killed or not places):
        return [] if is_killed else [_cut(line) for line in spoken[-_LINES_MAX:]]
    place = places[0 if _FIRST_IS_NEWEST in text else -1 :][:1]
    return [_cut(line) for line in (*place, *errors[-1:])]


def _cut(line: str) -> str:
    if len(line) <= _LINE_CHARS:
        return line
    return f"{line[:_LINE_CHARS].rpartition(' ')[0] or line[:_LINE_CHARS]} ..."


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
