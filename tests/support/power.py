"""Which bytes and names of local files would survive a loss of power, by what was synced."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: A file or directory, whatever it is called: device and inode.
_Identity = tuple[int, int]


class PowerLog:
    """Follows the system calls of this process below a directory."""

    def __init__(self, top: Path) -> None:
        #: The writes that could be lost at the instant when a manifest got its name.
        self.lost: list[str] = []
        self.num_commits = 0  #: How many manifests got theirs.
        self._top = top
        self._unsynced_bytes: set[_Identity] = set()
        self._unsynced_names: set[Path] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls while the block runs."""
        patches: list[Any] = [
            patch.object(os, n, self._writing(n)) for n in ("write", "writev", "pwrite")
        ]
        patches += [patch.object(os, n, self._naming(n)) for n in ("replace", "rename", "link")]
        patches += [
            patch.object(os, "mkdir", self._making()),
            patch.object(os, "fsync", self._syncing()),
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def _writing(self, name: str) -> Callable[..., int]:
        call = getattr(os, name)

        def write(fd: int, *rest: Any) -> int:
            self._unsynced_bytes.add(_identity(os.fstat(fd)))
            return int(call(fd, *rest))

        return write

    def _naming(self, name: str) -> Callable[..., None]:
        call = getattr(os, name)

        def give(source: Any, goal: Any) -> None:
            if Path(goal).name == "manifest.json":
                self._check(Path(source), Path(goal).parent)
            self._unsynced_names.discard(Path(source))
            self._unsynced_names.add(Path(goal))
            call(source, goal)

        return give

    def _making(self) -> Callable[..., None]:
        call = os.mkdir

        def make(path: Any, *rest: Any) -> None:
            call(path, *rest)
            self._unsynced_names.add(Path(path))

        return make

    def _syncing(self) -> Callable[[int], None]:
        call = os.fsync

        def sync(fd: int) -> None:
            call(fd)
            self._unsynced_bytes.discard(_identity(os.fstat(fd)))
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path.is_dir():
                self._unsynced_names = {n for n in self._unsynced_names if n.parent != path}

        return sync

    def _check(self, manifest: Path, directory: Path) -> None:
        """Note what a manifest that becomes visible now may promise without having it."""
        self.num_commits += 1
        files = [p for p in directory.rglob("*") if not p.name.startswith(".tmp-")]
        files = [p for p in files if ".tmp-" not in str(p.relative_to(directory))]
        self.lost += [
            f"bytes of {path.name}"
            for path in [manifest, *files]
            if path.is_file() and _identity(path.stat()) in self._unsynced_bytes
        ]
        above = [p for p in (directory, *directory.parents) if p.is_relative_to(self._top)]
        self.lost += [
            f"name of {path.relative_to(self._top)}"
            for path in [*files, *above]
            if path in self._unsynced_names
        ]


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
