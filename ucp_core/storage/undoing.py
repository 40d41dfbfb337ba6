"""What a writer of several files leaves behind if it fails: nothing."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucp_core.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.storage.base import Store

__all__ = ["tidied", "undone"]


@contextmanager
def undone(store: Store, directory: str) -> Iterator[list[str]]:
    """Undo what a block has written below ``directory`` if it fails.

    Yields:
        A list for paths, each to be added before it is written. The last one is deleted first.
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
    """Remove ``directory`` and those above it that a block has made, if they are empty at its end.

    Only on local and mounted file systems: object stores have no directories, and what others
    that fsspec knows call ``rmdir`` may take files with it.
    """
    made: list[Path] = []
    if isinstance(store, LocalStore):
        made = [p for p in (Path(directory), *Path(directory).parents) if not store.exists(str(p))]
    try:
        yield
    finally:
        for path in made:
            # It is not there, or has something in it, whoever has put it there.
            with suppress(OSError):
                path.rmdir()
