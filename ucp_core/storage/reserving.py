"""Where it pays to reserve the space of a file before it is written."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

#: File systems that reserve space by noting it; elsewhere the C library writes every block.
_TYPES = {"ext4", "xfs", "btrfs"}


def may_reserve(fd: int) -> bool:
    """Return whether ``posix_fallocate`` on this file is quick and makes writing faster."""
    return _type_of(os.fstat(fd).st_dev) in _TYPES


@cache
def _type_of(device: int) -> str:
    """Return the type of a file system, or nothing if that is unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""
