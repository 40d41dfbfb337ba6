"""The universal checkpoint: whole tensors in safetensors files that any tool can read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucp_core.checksums import crc32
from ucp_core.errors import ChecksumMismatchError
from ucp_core.storage.base import join

if TYPE_CHECKING:
    from ucp_core._open import Checkpoint


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
        values[name] = json.loads(data)
    return values
