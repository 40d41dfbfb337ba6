"""Let one command at a time launch the run of a directory, if the file system has locks.

Two commands at once would find no controller and would each launch one, on a cluster of its own.
The kernel locks the directory, and unlocks it when the command ends. An object store has no locks:
there the newest claim on the run counts (``ucp_core.storage.claim``), and the other command ends
and says which process has the run.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ucp_core.storage import LocalStore, open_store, retried


@contextlib.contextmanager
def one_launch(directory: str, *, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other command launches the run in ``directory``, and keep others waiting.

    ``say`` is called with a line for people before a wait. If the block raises, remove the
    directories that were created, unless they hold something.
    """
    store, path = open_store(directory)
    if not isinstance(store, LocalStore):
        yield
        return
    made = [each for each in (Path(path), *Path(path).parents) if not each.exists()]

    while True:
        store.makedirs(path)
        with contextlib.suppress(FileNotFoundError):
            place = retried(lambda: os.open(path, os.O_RDONLY))
            has_locks = _is_locked(place, directory, say)
            if not has_locks or os.path.samestat(os.fstat(place), Path(path).stat()):
                break
            os.close(place)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in made if has_locks else ():
                each.rmdir()
        raise
    finally:
        os.close(place)


def _is_locked(place: int, directory: str, say: Callable[[str], None]) -> bool:
    """Lock an open directory; return whether its file system has locks."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another command is launching the run in {directory}; waiting for it ...")
        fcntl.flock(place, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
