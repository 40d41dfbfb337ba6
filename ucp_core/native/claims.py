"""Claims on folders: of two exports or conversions into one folder, at most one continues."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucp_core.errors import UcpError
from ucp_core.native.opening import UNFINISHED_NAME
from ucp_core.storage import Store, join, tidied

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: File in ``UNFINISHED_NAME`` that the process that begins there creates exclusively.
CLAIM_NAME = "begun"
_EXPORT = b"export "


@contextmanager
def claimed(store: Store, directory: str) -> Iterator[None]:
    """Hold ``directory`` for an export while a block runs.

    The claim of a killed export stays, as do the files that it wrote.

    Raises:
        UcpError: Another export or conversion began there.
    """
    folder = join(directory, UNFINISHED_NAME)
    path = join(folder, CLAIM_NAME)
    content = _EXPORT + os.urandom(16).hex().encode()
    with tidied(store, folder):
        is_free = not store.list(folder)
        if not is_free or not store.write_atomic(path, content, fsync=False, exclusive=True):
            raise in_use(directory)
        try:
            # A conversion to a local folder makes its journal there and then looks for the claim.
            if store.list(folder) != (CLAIM_NAME,):
                raise in_use(directory)
            yield
        finally:
            # The process that deleted a live export's claim may have started its own.
            if store.exists(path) and store.read(path) == content:
                store.delete(path)


def refuse_taken(directory: str, taken: Iterable[str]) -> None:
    """Raise ``UcpError`` if a destination has files that an export would write."""
    for name in taken:
        raise UcpError(
            f"{directory} holds {name} already: give another destination or remove it",
            path=join(directory, name),
        )


def is_of_export(content: bytes) -> bool:
    """Return whether a claim's content is that of an export."""
    return content.startswith(_EXPORT)


def in_use(directory: str) -> UcpError:
    """Return the error for a folder that another process claimed."""
    return UcpError(
        f"another process exports or converts to {directory}, or was killed there: give "
        f"another destination; if none does, remove {join(directory, UNFINISHED_NAME)} and the "
        "files that it wrote",
        path=directory,
    )
