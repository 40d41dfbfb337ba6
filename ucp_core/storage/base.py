"""The contract of a store; ``tests/support/store_conformance.py`` checks every store against it.

Paths are ``/``-separated strings in the store's own terms; ``open_store`` turns a URL into one.
Every method raises a ``StorageError`` that names the path and says what to do. Several threads may
call a store at once. Sizes and offsets are in bytes.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ucp_core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

Buffer: TypeAlias = bytes | bytearray | memoryview
#: First byte, and the buffers to fill from there, in order. A plain tuple: named tuples make
#: reading rows one by one 5 % slower.
ReadRange: TypeAlias = tuple[int, tuple[memoryview, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Identifies a file, so that a reader notices a replacement."""

    size_bytes: int  #: Its size.
    text: str  #: Changes with each write, even if the size stays.
    is_of_content: bool  #: Whether it is the same on every machine that reads the file.


class Store(Protocol):
    """Files by path. A directory exists if a file is in it; ``makedirs`` is only a hint."""

    request_bytes: int  #: Larger reads than this are not faster.
    #: Whether ``append`` makes the file itself longer. If not, it writes a piece beside it, one
    #: request each; read such files with ``read_appended``.
    appends: bool

    def read(self, path: str) -> bytes:
        """Return the whole file."""

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``; a shorter file is an error."""

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range; a shorter file is an error."""

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Replace the file at ``path`` atomically: a reader sees the old file or the new one.

        Args:
            path: Its directory is made if needed.
            data: The whole content.
            fsync: Return only once the data would survive a power loss.
            exclusive: Change nothing and return False if the file exists already.

        Returns:
            Whether the file was written. Where the answer to a request may be lost, an existing
            file with the same bytes counts as written, since the request itself may have written
            it. Rivals that must detect each other write different bytes.
        """

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` in order and return the total size.

        The file appears at ``path`` once it is complete, and replaces an older one. If ``chunks``
        raises, nothing is left. The caller may reuse a chunk's memory once the next one is
        requested.
        """

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Append ``data`` to the file; create the file if it does not exist.

        After an error the data may be there nonetheless. See ``appends``.
        """

    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted; none if the directory does not exist.

        Temporary files of writers, even dead ones, are not listed.
        """

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file (not directory) in ``list``."""

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""

    def size(self, path: str) -> int:
        """Return the size of a file."""

    def stamp(self, path: str) -> Stamp:
        """Return a stamp that changes if another file takes the place of this one."""

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with its content; do nothing if it does not exist."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files of one bucket or file system with few requests; skip missing ones."""

    def makedirs(self, path: str) -> None:
        """Make a directory and its parents, if the storage has directories."""

    def lock(self, path: str, *, shared: bool) -> AbstractContextManager[bool | None]:
        """Try to lock an existing file while the block runs, without waiting.

        Any number of holders share a lock; an exclusive lock has one holder. Locks are advisory
        and end with their process.

        Yields:
            Whether the lock is held; None if the storage has no locks.

        Raises:
            StorageError: There is no such file.
        """


class RefusingStore:
    """Refuses every call; a store for one purpose derives from it and adds what it can do."""

    request_bytes = 1 << 20
    appends = True

    # ``Any``, so that a subclass may give every method its own type.
    def _refuse(self, *args: Any, **_: Any) -> Any:
        path = args[0] if args else ""
        raise StorageError(
            f"{type(self).__name__} cannot do this with {path}: it is for one use only", path=path
        )

    read = read_range = read_ranges = _refuse
    write_atomic = write_file = append = delete = delete_files = _refuse
    makedirs = lock = _refuse
    list = sizes = exists = size = stamp = _refuse


def ask_ahead(store: Store, path: str, ranges: Sequence[tuple[int, int]]) -> bool:
    """Tell a store with a method ``ahead`` what this thread will read next.

    Args:
        ranges: Offset and size of every range, in the order in which they will be read.

    Returns:
        Whether the store has the method.
    """
    ahead = getattr(store, "ahead", None)
    if ahead is not None:
        ahead(path, ranges)
    return ahead is not None


def kept_open(store: Store, path: str) -> AbstractContextManager[None]:
    """Let a store with a method ``kept_open`` open a file once for all reads in the block."""
    keep: Callable[[str], AbstractContextManager[None]] | None = getattr(store, "kept_open", None)
    return nullcontext() if keep is None else keep(path)


def join(*parts: str) -> str:
    """Return the parts as one path."""
    return "/".join([parts[0].rstrip("/"), *(p.strip("/") for p in parts[1:])]).rstrip("/")


def is_temporary(name: str) -> bool:
    """Return whether the name is that of a file that a writer has not finished."""
    return name.startswith(".tmp-")


def temporary_name(name: str) -> str:
    """Return a random name for ``name`` while it is being written."""
    return f".tmp-{os.urandom(6).hex()}-{name}"
