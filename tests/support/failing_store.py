"""Storage under a process that dies: after any number of changes, in the middle of one too.

Every kind counts what changes its storage, down to single system calls for local files. Once
dead, nothing that the process still does, as clearing up in an exception handler, has an effect:
a killed process runs no handlers.
"""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from ucp_core.storage import Buffer, LocalStore, MemoryStore, Store
from ucp_core.storage.remote import FsspecStore

T = TypeVar("T")


class DiedError(BaseException):
    """The process is dead. Not an ``Exception``: nothing may catch it."""


class How(StrEnum):
    """The fate of the change at which the process dies."""

    BEFORE = "before"
    WITHIN = "within"
    AFTER = "after"


class Fate:
    """Lets so many changes happen; then the process is dead until it is ``revive``d."""

    def __init__(self) -> None:
        self.revive()

    def revive(self) -> None:
        """Let everything happen again."""
        self._left: int | None = None
        self._how = How.BEFORE

    @property
    def is_dead(self) -> bool:
        """Return whether the process is dead."""
        return self._left is not None and self._left < 0

    def die(self, after: int, how: How) -> None:
        """Let ``after`` more changes happen, and the next one as ``how`` says."""
        self._left, self._how = after, how

    def change(self, act: Callable[[], T], within: Callable[[], object] | None = None) -> T:
        """Do a change if the process lives; ``within`` does a part of it, where it has parts."""
        if self._left is None:
            return act()
        self._left -= 1
        if self._left >= 0:
            return act()
        if self._left == -1:
            if self._how is How.AFTER:
                act()
            elif self._how is How.WITHIN and within is not None:
                within()
        raise DiedError


class World(Protocol):
    """A storage and the process that uses it."""

    store: Store  #: The store of the process; after a death, the store of the next one.
    root: str  #: Where in it.
    fate: Fate  #: When the process dies.

    def run(self, act: Callable[[], object]) -> bool:
        """Let a process do ``act``; return whether it came to the end alive."""


def _lived(act: Callable[[], object]) -> bool:
    try:
        act()
    except DiedError:
        return False
    return True


class LocalWorld:
    """Files, of which every system call that changes one counts."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = LocalStore()
        self.root = str(folder / "run")
        self.fate = Fate()

    def run(self, act: Callable[[], object]) -> bool:
        """Do it in a process of its own, which closes its files and locks as it dies."""
        pid = os.fork()
        if pid == 0:
            self._end(act)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in {0, _DEAD}, f"the process ended with {code}"
        return code == 0

    def _end(self, act: Callable[[], object]) -> NoReturn:
        """Put the fate between Python and the kernel, and end this process."""
        try:
            calls = {name: self._counted(name) for name in _CALLS}
            calls |= {name: self._written(name) for name in _WRITES}
            for name, call in calls.items():
                setattr(os, name, call)
            act()
            os._exit(0)
        except DiedError:
            os._exit(_DEAD)
        except BaseException:  # noqa: BLE001  the parent's test must not go on in the child
            traceback.print_exc()
            os._exit(1)

    def _counted(self, name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                return call(*args, **kwargs)
            return self.fate.change(lambda: call(*args, **kwargs))

        return counted

    def _written(self, name: str) -> Callable[..., int]:
        call = getattr(os, name)

        def written(fd: int, data: Any, *rest: int) -> int:
            whole = b"".join(data) if name == "writev" else bytes(data)
            half = whole[: len(whole) // 2]
            return self.fate.change(
                lambda: int(call(fd, data, *rest)),
                lambda: call(fd, [half] if name == "writev" else half, *rest),
            )

        return written


#: Calls that change a file system, as far as the store and the standard library use them.
_CALLS = {
    "ftruncate", "link", "mkdir", "open", "posix_fallocate", "remove", "rename", "replace",
    "rmdir", "truncate", "unlink",
}  # fmt: skip
_WRITES = {"pwrite", "write", "writev"}
#: The exit code of a process that met its fate.
_DEAD = 9


class _FatedMemoryStore(MemoryStore):
    """Dies between the chunks of a file and between the files of a directory, too."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        write = super().write_atomic
        return self._fate.change(lambda: write(path, data, fsync=fsync, exclusive=exclusive))

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        def lived() -> Iterator[Buffer]:
            for chunk in chunks:
                self._fate.change(lambda: None)
                yield chunk

        # The base class ends with ``write_atomic``.
        return super().write_file(path, lived(), fsync=fsync)

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        add = super().append
        half = bytes(data)[: len(data) // 2]
        self._fate.change(
            lambda: add(path, data, fsync=fsync), lambda: add(path, half, fsync=fsync)
        )

    def delete(self, path: str) -> None:
        delete = super().delete
        for key in sorted(k for k in self._files if f"{k}/".startswith(f"{path.strip('/')}/")):
            self._fate.change(lambda key=key: delete(key))  # type: ignore[misc]


class MemoryWorld:
    """The memory store, of which every file and chunk counts."""

    def __init__(self, folder: Path) -> None:
        del folder
        self.fate = Fate()
        self.store: Store = _FatedMemoryStore(self.fate)
        self.root = "run"

    def run(self, act: Callable[[], object]) -> bool:
        """Do it here: nothing but the memory is left of a process that died."""
        return _lived(act)


class _FatedFileSystem(MemoryFileSystem):
    """A remote file system whose files grow in place, so that half-written ones are seen."""

    protocol = "fated"
    cachable = False

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self._fate = fate

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        opened = super()._open
        if mode == "rb":
            return opened(path, mode, **kwargs)
        file = self._fate.change(lambda: opened(path, mode, **kwargs))

        def write(data: Any) -> int:
            half = bytes(data)[: len(data) // 2]
            return self._fate.change(
                lambda: int(MemoryFile.write(file, data)), lambda: MemoryFile.write(file, half)
            )

        file.write = write
        return file

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        copy = super().cp_file
        self._fate.change(lambda: copy(path1, path2, **kwargs))

    def rm_file(self, path: str) -> None:
        remove = super()._rm
        self._fate.change(lambda: remove(path))

    _rm = rm_file

    def rmdir(self, path: str) -> None:
        remove = super().rmdir
        self._fate.change(lambda: remove(path))


class FsspecWorld:
    """A remote file system without locks, of which every call and every piece written counts."""

    def __init__(self, folder: Path) -> None:
        del folder
        self.fate = Fate()
        self.store: Store = FsspecStore(_FatedFileSystem(self.fate))
        self.root = "/run"

    def run(self, act: Callable[[], object]) -> bool:
        """Do it here: nothing but the memory is left of a process that died."""
        return _lived(act)


WORLDS: dict[str, Callable[[Path], World]] = {
    "local": LocalWorld,
    "memory": MemoryWorld,
    "fsspec": FsspecWorld,
}
