"""The universal checkpoint: whole tensors in safetensors files that any tool can read.

No rank, no padding and no parallelism in it. ``ucp_core.conversion.convert`` writes it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucp_core.conversion.convert import MEMORY_BYTES_MIN, convert
from ucp_core.errors import CheckpointCorruptError, ChecksumMismatchError
from ucp_core.native.opening import Checkpoint
from ucp_core.numerics.checksums import crc32
from ucp_core.storage.base import Store, join

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MEMORY_BYTES_MIN", "materialise", "read_extra"]


def materialise(
    checkpoint: Checkpoint,
    destination_store: Store,
    destination_directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a universal checkpoint, in this process alone and so that it survives a power loss.

    ``ucp_core.conversion.convert.convert`` does the same with all options.

    Args:
        checkpoint: The source: native, universal or foreign.
        destination_store: Where to.
        destination_directory: New, empty, or left behind by a conversion that was interrupted.
        memory_bytes: Bound of the buffers; at least ``MEMORY_BYTES_MIN``.
        progress: Called with the bytes done and the bytes of the whole state.

    Raises:
        UcpError: The destination holds a checkpoint or other files, or the bound is too small.
        CheckpointCorruptError: The source is damaged; nothing is committed.
        StorageError: A storage refused.
    """
    convert(
        checkpoint,
        destination_store,
        destination_directory,
        memory_bytes=memory_bytes,
        processes=1,
        progress=progress,
        fsync=True,
    )


def read_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the small named values of a universal checkpoint, verified.

    Raises:
        ChecksumMismatchError: A file is damaged.
    """
    values: dict[str, Any] = {}
    for name, file in checkpoint.manifest.extra.items():
        path = join(checkpoint.directory, file)
        data = checkpoint.store.read(path)
        if crc32(data) != checkpoint.manifest.files[file].crc32:
            raise ChecksumMismatchError(f"{path} is damaged; use an older checkpoint", path=path)
        try:
            values[name] = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} is not JSON: {error}", path=path) from error
    return values
