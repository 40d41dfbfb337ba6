"""The contract of a store, which ``tests/support/store_conformance.py`` checks on every one.

Paths are ``/``-separated strings in the store's own terms; ``open_store`` says which for a URL.
Every method raises ``StorageError`` that names the path and what to do; calls are safe from
several threads at once. Sizes and offsets are in bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

Buffer: TypeAlias = bytes | bytearray | memoryview
#: Read from this byte on into these buffers, one after the other, until all are full. A pair
#: without names: to make one with names took a twentieth of the time of reading rows one by one.
ReadRange: TypeAlias = tuple[int, tuple[memoryview, ...]]


class Store(Protocol):
    """Files by path. Directories exist where files are; ``makedirs`` is a hint.

    Attributes:
        request_bytes: Reads of this size are as fast as it gets; larger ones gain nothing.
    """

    request_bytes: int

    def read(self, path: str) -> bytes:
        """Return the whole file."""

    def read_range(self, path: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` from ``offset_bytes``; a shorter file is an error."""

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the buffers of every range; a shorter file is an error."""

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        """Put ``data`` at ``path`` at once: a reader sees the old file or the new one.

        Args:
            path: Where; its directory is made.
            data: The whole content.
            fsync: Return only when the data would survive a loss of power.
            exclusive: Change nothing and return False if the file exists already.

        Returns:
            Whether it was written. Of rivals that write the same bytes at the same instant, more
            than one may be told so.
        """

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` one after the other and return the size.

        The file appears at ``path`` when it is complete, in place of any older one; an exception
        from ``chunks`` leaves no trace. A chunk may be reused once the next one is asked for.
        """

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        """Add ``data`` at the end of the file, which is made if it is not there."""

    def list(self, directory: str) -> tuple[str, ...]:
        """Return the names in ``directory``, sorted; none if there is no such directory.

        Files of which the writer died are not listed.
        """

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of every file (not directory) of ``list``."""

    def exists(self, path: str) -> bool:
        """Return whether a file or directory is there."""

    def size(self, path: str) -> int:
        """Return the size of a file."""

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all in it; nothing happens if there is none."""

    def makedirs(self, path: str) -> None:
        """Make a directory and its parents where the storage has such a thing."""

    def lock(self, path: str, *, shared: bool) -> AbstractContextManager[bool | None]:
        """Lock a file that exists, as long as the block runs; nobody waits.

        Any number of holders share a lock; one that is not shared has no other beside it. Locks
        bind only those that ask for them, and die with their process.

        Yields:
            Whether the lock is held; None if the storage has no locks.

        Raises:
            StorageError: There is no such file, or no longer.
        """


def ask_ahead(store: Store, path: str, ranges: Sequence[tuple[int, int]]) -> bool:
    """Tell a store what this thread reads next, if it is one that has ``ahead``.

    Args:
        store: Where it will be read.
        path: Which file.
        ranges: Where each range begins and its size, in the order in which they will be read.

    Returns:
        Whether it is such a store.
    """
    ahead = getattr(store, "ahead", None)
    if ahead is not None:
        ahead(path, ranges)
    return ahead is not None


def join(*parts: str) -> str:
    """Return the parts as one path."""
    return "/".join([parts[0].rstrip("/"), *(p.strip("/") for p in parts[1:])]).rstrip("/")


def is_temporary(name: str) -> bool:
    """Return whether ``name`` is a file that is still being written, or whose writer died."""
    return name.startswith(".tmp-")


def temporary_name(name: str) -> str:
    """Return a name for ``name`` while it is being written.

    Random: processes of two machines that share a file system can have the same number.
    """
    return f".tmp-{os.urandom(6).hex()}-{name}"
