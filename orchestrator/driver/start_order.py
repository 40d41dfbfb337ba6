"""Commands that begin a run in one directory do so one after the other.

Two at once would find no controller, begin one each on a cluster of its own, and both would train
into the directory. The kernel keeps the turn in a directory of a file system, and ends it with
the command. Where there are no such locks, as in an object store, turns are numbered files:

- turn n + 1 may be taken when turn n is over, and is whose file is there first: the store puts
  only one of two at the same path (``write_atomic``, ``exclusive``);
- who has a turn rewrites its file as a sign of life, and a last time when it is over;
- a file that nobody has rewritten for long is of a command that has died. Who waits measures that
  on its own clock: those of two machines are not compared;
- no file is removed, so no number comes twice, and who was taken for dead sees a higher one.
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
from ucp_core.storage import LocalStore, Store, join, open_store

__all__ = ["NumberedTurns", "taking_turns"]

#: In the run directory.
_TURNS = "turns"
#: How often a sign of life is given, and looked for.
_SIGN_S = 2.0
#: Longer than one sign can take: a store that fails for a moment is asked for half a minute.
_DEAD_S = 60.0


@contextlib.contextmanager
def taking_turns(directory: str, *, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Let commands begin the run in ``directory`` one after the other.

    Args:
        directory: Of the run, a path or an fsspec URL.
        say: Is told that another command is waited for.

    Yields:
        What raises ``CapacityError`` if the turn was lost meanwhile: to be called before the act
        that nobody else may do at the same time.
    """
    store, path = open_store(directory)
    if isinstance(store, LocalStore):
        Path(path).mkdir(parents=True, exist_ok=True)
        place = os.open(path, os.O_RDONLY)
        try:
            if _is_locked(place, lambda: say(_waiting(directory))):
                yield lambda: None
                return
        finally:
            os.close(place)
    turns = NumberedTurns(store, join(path, _TURNS))
    with turns.taking(
        lambda: say(f"{_waiting(directory)} (a minute if that one has died)")
    ) as require:
        yield require


def _waiting(directory: str) -> str:
    return f"another command is beginning the run in {directory}; waiting for it ..."


def _is_locked(place: int, on_wait: Callable[[], None]) -> bool:
    """Lock what is open; return whether it has locks, which some file systems of networks lack."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(place, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


class NumberedTurns:
    """Turns as files of a store.

    Args:
        store: Where.
        directory: Of the files.
        dead_s: Who has given no sign of life for so long has died.
        now_s: A clock that never goes back.
        pause: Waits.
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
        #: Of this object alone, so that a repeated request finds what it has written itself.
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(6).hex()}"

    @contextlib.contextmanager
    def taking(self, on_wait: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Hold a turn as long as the block runs; see ``taking_turns``."""
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
        """Return the number of the turn that is ours now."""
        seen, seen_s, waits = (0, b""), self._now_s(), False
        while True:
            newest = self._newest()
            data = self._store.read(self._path(newest)) if newest else b""
            if (newest, data) != seen:
                seen, seen_s = (newest, data), self._now_s()
            if not newest or _is_over(data) or self._now_s() - seen_s >= self._dead_s:
                mine = self._document(0, is_over=False)
                if self._store.write_atomic(
                    self._path(newest + 1), mine, fsync=False, exclusive=True
                ):
                    return newest + 1
                continue
            if not waits:
                waits = True
                on_wait()
            self._pause(_SIGN_S)

    def _sign(self, number: int, over: threading.Event) -> None:
        """Give signs of life until the turn is over, and say that it is."""
        num_signs, is_over = 0, False
        while not is_over:
            is_over = over.wait(_SIGN_S)
            num_signs += 1
            document = self._document(num_signs, is_over=is_over)
            # Without signs the turn is lost at worst, and that is noticed.
            with contextlib.suppress(StorageError):
                self._store.write_atomic(self._path(number), document, fsync=False)

    def _require(self, number: int) -> None:
        if self._newest() != number:
            raise CapacityError(
                f"{self._directory}: another command took over to begin this run, because this "
                f"one gave no sign of life for {self._dead_s:g} s; run it again to join that run",
                path=self._directory,
            )

    def _newest(self) -> int:
        names = (name.partition(".")[0] for name in self._store.list(self._directory))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _document(self, num_signs: int, *, is_over: bool) -> bytes:
        document = {"holder": self._holder, "num_signs": num_signs, "is_over": is_over}
        return json.dumps(document).encode()

    def _path(self, number: int) -> str:
        return join(self._directory, f"{number:06d}.json")


def _is_over(data: bytes) -> bool:
    try:
        return bool(json.loads(data)["is_over"])
    except (ValueError, KeyError, TypeError):
        return False
