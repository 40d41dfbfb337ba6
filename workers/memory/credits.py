"""Limit how many ranks of a node move their snapshots at the same time, by credits.

If eight devices copied at once, they would fill the memory bus that training needs. So a rank moves
a snapshot only while it holds one of a few credits. Credits are file locks in the keeper's
directory, which the kernel releases when a process dies. They are advisory: a rank that gets none
for a while continues without one, because a stopped rank keeps its credit.

Source: the node level of REFT's hierarchical snapshots (arXiv 2310.12670).
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: Maximum number of credits: four copies at once fill four pinned buses, and leave memory
#: bandwidth.
_NUM_MAX: Final = 4
_FOLDER: Final = "credits"
#: Time that a rank waits for a credit. Another rank holds it for some 10 ms.
PATIENCE_S: Final = 0.1
_AGAIN_S: Final = 0.002


class Credits:
    """The credits of one node, used by one rank. Their default number depends on the machine."""

    def __init__(self, directory: Path, num: int | None = None) -> None:
        self._folder = directory / _FOLDER
        self._num = num or min(_NUM_MAX, max(1, (os.cpu_count() or 1) // 2))
        #: The open files. They stay open because a snapshot takes credits several times.
        self._fds: list[int] = []

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    @contextmanager
    def one(self, patience_s: float = PATIENCE_S) -> Iterator[bool]:
        """Hold a credit; yield whether one became free within ``patience_s``."""
        fd = self._take(time.monotonic() + patience_s)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _take(self, until_s: float) -> int | None:
        try:
            if len(self._fds) < self._num:
                self._open()
            while True:
                for fd in self._fds:
                    if _locked(fd):
                        return fd
                if time.monotonic() >= until_s:
                    return None
                time.sleep(_AGAIN_S)
        except OSError:
            # A full disk or a lack of descriptors does not justify skipping the snapshot.
            return None

    def _open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        for number in range(len(self._fds), self._num):
            path = self._folder / str(number)
            self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
