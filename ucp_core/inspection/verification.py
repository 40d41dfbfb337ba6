"""Reads every byte of a checkpoint and names what is not as it was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
)
from ucp_core.geometry import prove_entry
from ucp_core.inspection.foreign import foreign_problems, unchecked_bytes
from ucp_core.manifest import Kind, Problem, from_bytes
from ucp_core.native import MANIFEST_NAME, Checkpoint, rank_name, reading
from ucp_core.numerics import crc32
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucp_core.geometry import Fragment, TensorKey

__all__ = ["unchecked_bytes", "verify"]

#: Read at a time: enough for full speed, little enough to run beside a training.
_CHUNK_BYTES = 8 << 20


def verify(
    checkpoint: Checkpoint, *, progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Return every problem of the checkpoint: missing files, wrong sizes, any flipped byte, holes.

    Args:
        checkpoint: Of any format. A foreign one is read by the checksums that its own format
            has (``unchecked_bytes`` tells what has none), and its replicas are compared.
        progress: Called with the bytes done and the bytes of all files.
    """
    try:
        with reading(checkpoint):
            return _problems(checkpoint, progress)
    except CheckpointNotFoundError as error:
        return [Problem(MANIFEST_NAME, str(error))]


def _problems(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> list[Problem]:
    holes = _holes(checkpoint)
    if checkpoint.manifest.kind is Kind.FOREIGN:
        return [*holes.values(), *foreign_problems(checkpoint, set(holes), progress)]
    problems = [*_documents(checkpoint), *holes.values()]
    by_file: dict[str, list[tuple[Fragment, TensorKey]]] = {}
    for key, entry in checkpoint.state_map.entries.items():
        for fragment in entry.fragments:
            by_file.setdefault(fragment.file, []).append((fragment, key))
    total = sum(entry.num_bytes for entry in checkpoint.manifest.files.values())
    done = 0
    for name, file in sorted(checkpoint.manifest.files.items()):
        path = join(checkpoint.directory, name)
        try:
            size = checkpoint.store.size(path)
        except StorageError as error:
            problems.append(Problem(name, str(error)))
            continue
        if size != file.num_bytes:
            problems.append(Problem(name, f"has {size} bytes, written were {file.num_bytes}"))
        elif not _is_whole(checkpoint, path, file.num_bytes, file.crc32):
            found = [
                Problem(name, f"{key}: box {fragment.box}: {where}")
                for fragment, key in by_file.get(name, ())
                for where in _damaged_blocks(checkpoint, path, fragment)
            ]
            outside = [Problem(name, "is damaged outside of its tensors")]
            problems += found or outside
        done += file.num_bytes
        if progress is not None:
            progress(done, total)
    return problems


def _holes(checkpoint: Checkpoint) -> dict[TensorKey, Problem]:
    """Return the tensors whose fragments do not hold each element once."""
    found: dict[TensorKey, Problem] = {}
    for key, entry in checkpoint.state_map.entries.items():
        try:
            prove_entry(entry)
        except CheckpointCorruptError as error:
            found[key] = Problem(f"tensors.{key.fqn}.slots.{key.slot}", str(error))
    return found


def _documents(checkpoint: Checkpoint) -> list[Problem]:
    """Read the manifest again, and the rank records that it was merged from."""
    names = [MANIFEST_NAME]
    if checkpoint.manifest.kind is Kind.DISTRIBUTED:
        ranks = range(checkpoint.manifest.world_size)
        names += [f"{rank_name(checkpoint.attempt, rank)}.json" for rank in ranks]
    problems: list[Problem] = []
    for name in names:
        try:
            from_bytes(checkpoint.store.read(join(checkpoint.directory, name)), where=name)
        except (CheckpointCorruptError, StorageError) as error:
            problems.append(Problem(name, str(error)))
    return problems


def _is_whole(checkpoint: Checkpoint, path: str, num_bytes: int, expected: int) -> bool:
    value = 0
    buffer = np.empty(min(num_bytes, _CHUNK_BYTES), dtype=np.uint8).data
    for low in range(0, num_bytes, _CHUNK_BYTES):
        part = buffer[: min(_CHUNK_BYTES, num_bytes - low)]
        checkpoint.store.read_ranges(path, [(low, (part,))])
        value = crc32(part, value)
    return value == expected


def _damaged_blocks(checkpoint: Checkpoint, path: str, fragment: Fragment) -> list[str]:
    block_bytes = checkpoint.state_map.block_bytes
    found: list[str] = []
    for index, expected in enumerate(fragment.blocks):
        low = index * block_bytes
        size = min(block_bytes, fragment.num_bytes - low)
        start = fragment.offset_bytes + low
        if crc32(checkpoint.store.read_range(path, start, size)) != expected:
            found.append(f"damaged in bytes {start} to {start + size}")
    return found
