"""Clean up after a writer of several files that fails."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucp_core.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.storage.base import Store


@contextmanager
def undone(store: Store, directory: str) -> Iterator[list[str]]:
    """Delete what a block has written below ``directory`` if the block fails.

    Yields:
        A list: add each path before writing it. The last one is deleted first.
    """
    written: list[str] = []
    with tidied(store, directory):
        try:
            yield written
        except BaseException:
            for path in reversed(written):
                store.delete(path)
            raise


@contextmanager
def tidied(store: Store, directory: str) -> Iterator[None]:
    """Remove ``directory`` and its parents if a block created them and left them empty.

    This happens only on local and mounted file systems: object stores have no directories, and
    ``rmdir`` of other fsspec file systems may delete files, too.
    """
    made: list[Path] = []
    if isinstance(store, LocalStore):
        made = [p for p in (Path(directory), *Path(directory).parents) if not store.exists(str(p))]
    try:
        yield
    finally:
        for path in made:
            # It does not exist or is not empty.
            with suppress(OSError):
                path.rmdir()
