"""A reader holds its checkpoint, so that no collector deletes it meanwhile."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ucp_core.errors import CheckpointNotFoundError, StorageError
from ucp_core.manifest import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.native.opening import Checkpoint


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Keep ``collect_garbage``, in any process, from deleting ``checkpoint`` meanwhile.

    ``load``, ``convert`` and ``verify`` do so by themselves; this is for what calls them several
    times. Local files are held by a lock on the manifest, which dies with the process. Storages
    without locks are not asked: there the collector leaves the data for a time of grace.

    Raises:
        CheckpointNotFoundError: It was deleted since it was opened.
        StorageError: The storage refused.
    """
    with ExitStack() as stack:
        if checkpoint.manifest.kind is not Kind.FOREIGN:
            path = checkpoint.manifest_path
            try:
                held = stack.enter_context(checkpoint.store.lock(path, shared=True))
            except StorageError as error:
                if not error.facts.get("missing"):
                    raise
                held = False
            if held is False:
                raise CheckpointNotFoundError(
                    f"{checkpoint.directory} was deleted since it was opened: newer checkpoints "
                    "took its place; use one of them, or keep more of them",
                    path=path,
                )
        yield
