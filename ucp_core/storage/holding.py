"""Hold a run's directory, so that a second process that wants to train in it is refused.

A script that runs alone holds the directory exclusively. Controllers of a run share it: one that
restarts, or takes the run over from an unreachable cluster, must not wait for another. A worker
shares it, too, since it trains on while there is no controller. The kernel releases a process's
hold when it ends. Where there are no locks, the newer claim wins (``ucp_core.storage.Owner``).
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ucp_core.errors import HeldError, StorageError
from ucp_core.storage.base import Store, join
from ucp_core.storage.local import ADVICE, is_local
from ucp_core.storage.ownership import CLAIMS

_HOLDER = "holder.json"
#: The controller of a finished run ends a moment after the command that followed it.
_WAIT_S = 5.0


@contextlib.contextmanager
def held(store: Store, directory: str, *, shared: bool, is_named: bool = True) -> Iterator[None]:
    """Hold a run's directory while the block runs.

    Args:
        shared: Whether other sharing processes may hold it as well.
        is_named: Whether others read that this process is the holder.

    Raises:
        HeldError: Another process holds it.
        StorageError: The directory cannot be written.
    """
    if not is_local(store):
        yield
        return
    path = join(directory, CLAIMS, _HOLDER)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, f"failed: {error.strerror}")
        raise StorageError(f"{path} {advice}", path=path, errno=error.errno) from error
    try:
        if not _lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            raise HeldError(
                f"another process trains in {directory}: {_told(os.pread(fd, 4096, 0))}; stop it, "
                "or name another directory",
                path=directory,
            )
        if is_named:
            _name(fd)
        yield
    finally:
        os.close(fd)


def _name(fd: int) -> None:
    """Write who holds the directory."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    os.ftruncate(fd, os.pwrite(fd, json.dumps(record).encode(), 0))


def _lock(fd: int, kind: int) -> bool:
    """Lock the file if that is possible soon; return False if another process holds it.

    A ``lockf`` lock belongs to the process: forked children, such as those of a DataLoader, do not
    hold it when the process is killed.
    """
    give_up_s = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.lockf(fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EAGAIN}:
                # A mount without locks.
                return True
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(0.1)
        else:
            return True


def _told(data: bytes) -> str:
    """Return who the holder is; it may not have written that yet."""
    try:
        return "pid {pid}, host {host}, since {since}".format_map(json.loads(data))
    except (ValueError, KeyError, TypeError):
        return "it has just started"
