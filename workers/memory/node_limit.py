"""How much memory the node has left for snapshots: the machine's, and what the container may."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["available_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS) -> int:
    """Return how much memory could be taken now without anything being paged out or killed.

    Args:
        meminfo: What the kernel says of the machine.
        cgroups: What it says of this container, whose limit may be lower; either version.
    """
    found = [_meminfo_bytes(meminfo)]
    for directory, limit, usage, idle in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (
            cgroups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        # No such limit: neither the file nor a number in it.
        with contextlib.suppress(OSError, ValueError):
            left = int((directory / limit).read_text()) - int((directory / usage).read_text())
            found.append(left + _stat_bytes(directory / "memory.stat", idle))
    return max(0, min(found))


def _meminfo_bytes(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{path} does not say what is available")


def _stat_bytes(path: Path, name: str) -> int:
    """Return a count: what the kernel would give up at once is charged to the container too."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
