"""Read the kernel's report on a process that cannot report itself."""

import contextlib
from pathlib import Path
from typing import Final

#: Maximum number of threads to list individually; Ray alone has some dozens.
_NUM_THREADS_MAX: Final = 256


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
