"""Lets one command at a time launch the run of a directory.

Two commands at once would find no controller, launch one each on a cluster of its own, and both
would train into the directory. On a file system the kernel locks the directory, and unlocks it
when the command ends. An object store has no locks, so there each launch has a numbered file:

- launch n + 1 may begin when launch n is over. It belongs to the command that writes its file
  first: the store accepts only one write to the same path (``write_atomic``, ``exclusive``).
- The command rewrites its file every few seconds, and a last time when its launch is over.
- A file that is not rewritten for a minute belongs to a dead command. The waiting command measures
  that on its own clock, because the clocks of two machines cannot be compared.
- No file is removed, so no number comes twice. A command that was taken for dead sees a higher
  number and gives up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.errors import CapacityError
from orchestrator.shell import monotonic_s
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, Store, join, open_store, retried

#: Folder in the run directory.
_LAUNCHES = "launches"
#: How often a command rewrites its file, and looks at that of another.
_SIGN_S = 2.0
#: Longer than one write can take: a store that fails for a moment is retried for half a minute.
_DEAD_S = 60.0


@contextlib.contextmanager
def one_launch(directory: str, *, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Wait until no other command launches the run in ``directory``, and keep others waiting.

    ``say`` is called with a line for people before a wait.

    Yields:
        A function that raises ``CapacityError`` if another command took over meanwhile. Call it
        before the act that no two commands may do at once.
    """
    store, path = open_store(directory)
    if isinstance(store, LocalStore):
        with _locked(store, path, lambda: say(_waiting(directory))) as has_locks:
            if has_locks:
                yield lambda: None
                return
    launches = NumberedLaunches(store, join(path, _LAUNCHES))
    with launches.next(
        lambda: say(f"{_waiting(directory)} (a minute if that command has died)")
    ) as require:
        yield require


def _waiting(directory: str) -> str:
    return f"another command is launching the run in {directory}; waiting for it ..."


@contextlib.contextmanager
def _locked(store: LocalStore, path: str, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Make a directory, and lock it while the block runs; yield whether its file system has locks.

    If the block raises, remove the directories that were made and hold nothing.
    """
    made = [each for each in (Path(path), *Path(path).parents) if not each.exists()]
    while True:
        store.makedirs(path)
        with contextlib.suppress(FileNotFoundError):
            place = retried(lambda: os.open(path, os.O_RDONLY))
            has_locks = _is_locked(place, on_wait)
            if not has_locks or os.path.samestat(os.fstat(place), Path(path).stat()):
                break
            os.close(place)
    try:
        yield has_locks
    except BaseException:
        with contextlib.suppress(OSError):
            for each in made if has_locks else ():
                each.rmdir()
        raise
    finally:
        os.close(place)


def _is_locked(place: int, on_wait: Callable[[], None]) -> bool:
    """Lock an open directory; return whether its file system has locks."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(place, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


class NumberedLaunches:
    """Launches as numbered files in ``directory``.

    A command that has not rewritten its file for ``dead_s`` has died.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        *,
        dead_s: float = _DEAD_S,
        now_s: Callable[[], float] = monotonic_s,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._directory = directory
        self._dead_s = dead_s
        self._now_s = now_s
        self._pause = pause

    @contextlib.contextmanager
    def next(self, on_wait: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Hold the next launch as long as the block runs; see ``one_launch``."""
        number = self._take(on_wait)
        over = threading.Event()
        signs = threading.Thread(target=self._sign, args=(number, over), daemon=True)
        signs.start()
        try:
            yield lambda: self._require(number)
        finally:
            over.set()
            signs.join()

    def _take(self, on_wait: Callable[[], None]) -> int:
        """Wait for the next launch; return its number."""
        seen, seen_s, waits = (0, b""), self._now_s(), False
        while True:
            newest = self._newest()
            data = self._store.read(self._path(newest)) if newest else b""
            if (newest, data) != seen:
                seen, seen_s = (newest, data), self._now_s()
            if not newest or _is_over(data) or self._now_s() - seen_s >= self._dead_s:
                if self._write(newest + 1, is_new=True):
                    return newest + 1
                continue
            if not waits:
                waits = True
                on_wait()
            self._pause(_SIGN_S)

    def _sign(self, number: int, over: threading.Event) -> None:
        """Rewrite the file until the launch is over, and a last time then."""
        is_over = False
        while not is_over:
            is_over = over.wait(_SIGN_S)
            # At worst another command takes over, which ``_require`` notices.
            with contextlib.suppress(StorageError):
                self._write(number, is_over=is_over)

    def _require(self, number: int) -> None:
        if self._newest() != number:
            raise CapacityError(
                f"{self._directory}: another command took over this launch, because this one "
                f"could not write there for {self._dead_s:g} s; run it again to join that run",
                path=self._directory,
            )

    def _newest(self) -> int:
        names = (name.partition(".")[0] for name in self._store.list(self._directory))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _write(self, number: int, *, is_over: bool = False, is_new: bool = False) -> bool:
        # The sign differs each time, so that a retried write also recognises its own file.
        holder, sign = f"{socket.gethostname()}:{os.getpid()}", os.urandom(6).hex()
        data = json.dumps({"holder": holder, "sign": sign, "is_over": is_over}).encode()
        return self._store.write_atomic(self._path(number), data, fsync=False, exclusive=is_new)

    def _path(self, number: int) -> str:
        return join(self._directory, f"{number:06d}.json")


def _is_over(data: bytes) -> bool:
    try:
        return bool(json.loads(data)["is_over"])
    except (ValueError, KeyError, TypeError):
        return False
