"""Decide how much of a node's memory one run's snapshots may use, beside those of other runs."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from workers.keeper.arena_table import available_bytes, meminfo_bytes

_NAME: Final = "budget"


class Budget:
    """The share of one run.

    By default it is half of the memory that the node had available when the run's first keeper
    started there, minus the memory that keepers of other runs may still use. A file beside the
    run's other files keeps it, because a later keeper would count existing snapshots as used
    memory. The keeper locks the file while it lives, so that others know that the share counts.

    Args:
        directory: Directory of the run on the node; every run there has its own ``ROOT/RUN/NODE``.
        node_memory_mib: The user's limit; 0 selects the default.
    """

    def __init__(self, directory: Path, node_memory_mib: int) -> None:
        path = directory / _NAME
        # Lock, so that one of two starting keepers sees the other's memory.
        with _locked(directory.parent.parent):
            found = node_memory_mib << 20
            if not found:
                with contextlib.suppress(OSError, ValueError):
                    found = int(path.read_text())
            self.num_bytes = found or (available_bytes() - _claimed_bytes(path)) // 2
            self.num_bytes = max(self.num_bytes, 0)
            path.write_text(str(self.num_bytes))
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the share. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _claimed_bytes(own: Path) -> int:
    """Return the memory that keepers of other runs on the node may still use.

    They use shared memory already. Their part of it is unknown, so all shared memory counts as
    theirs.
    """
    pattern = f"*/{own.parent.name}/{_NAME}"
    others = [path for path in own.parent.parent.parent.glob(pattern) if path != own]
    claimed = sum(_living_bytes(path) for path in others)
    return max(claimed - (meminfo_bytes("Shmem") or 0), 0)


def _living_bytes(path: Path) -> int:
    """Return the budget in a file; 0 if no keeper holds it."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
    except OSError:
        pass  # It has just ended, or belongs to another user.
    return 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
