"""Reads a foreign checkpoint by the checksums that its own format has, and compares replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ucp_core.conversion import Item, Job, Worker, plan_extents
from ucp_core.errors import CheckpointCorruptError, StorageError
from ucp_core.formats import target_files
from ucp_core.geometry import Fragment, StateMap, TensorKey
from ucp_core.manifest import Problem
from ucp_core.numerics import BLOCK_BYTES, crc32
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucp_core.native import Checkpoint

_CHUNK_BYTES = 8 * BLOCK_BYTES


class _Range:
    """Bytes of a file that have a checksum, and what is in them."""

    def __init__(self, low: int, num_bytes: int, expected: int) -> None:
        self.low = low
        self.high = low + num_bytes
        self.expected = expected


def foreign_problems(
    checkpoint: Checkpoint,
    broken: set[TensorKey],
    progress: Callable[[int, int], None] | None,
) -> Iterator[Problem]:
    """Yield what is missing, cut short, not as its checksum says, or not as its replica is.

    Args:
        checkpoint: A foreign one.
        broken: Tensors that are known to be wrong; their replicas are not compared.
        progress: Called with the bytes done and the bytes that have checksums.
    """
    broken = set(broken)
    held: dict[str, list[tuple[Fragment, TensorKey]]] = {}
    for key, entry in checkpoint.state_map.entries.items():
        for fragment in entry.fragments:
            held.setdefault(fragment.file, []).append((fragment, key))
    files = sorted({*held, *checkpoint.state_map.extents})
    ranges = {file: _ranges(checkpoint, file, held.get(file, [])) for file in files}
    total = sum(one.high - one.low for found in ranges.values() for one in found)
    done = 0
    for file in files:
        path = join(checkpoint.directory, file)
        end = max([one.high for one in ranges[file]] + [_end(f) for f, _ in held.get(file, [])])
        try:
            size = checkpoint.store.size(path)
            problem = f"has {size} bytes, its tensors reach to {end}" if size < end else None
        except StorageError as error:
            problem = str(error)
        if problem is not None:
            yield Problem(file, problem)
            broken |= {key for _, key in held.get(file, [])}
            continue
        for one in ranges[file]:
            if _crc32(checkpoint, path, one) != one.expected:
                keys = {k for f, k in held.get(file, []) if _meets(f, one)}
                broken |= keys
                whose = f" ({', '.join(sorted(map(str, keys))[:4])})" if keys else ""
                yield Problem(file, f"damaged in bytes {one.low} to {one.high}{whose}")
            done += one.high - one.low
            if progress is not None:
                progress(done, total)
    yield from _differing(checkpoint, broken)


def unchecked_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes of tensors have no checksum in the checkpoint's own format."""
    total = 0
    for entry in checkpoint.state_map.entries.values():
        for fragment in entry.fragments:
            if fragment.crc32 is None and not any(
                extent.offset_bytes <= fragment.offset_bytes
                and _end(fragment) <= extent.offset_bytes + extent.num_bytes
                for extent in checkpoint.state_map.extents.get(fragment.file, ())
            ):
                total += fragment.num_bytes
    return total


def _ranges(
    checkpoint: Checkpoint, file: str, held: list[tuple[Fragment, TensorKey]]
) -> list[_Range]:
    found = [_Range(*extent) for extent in checkpoint.state_map.extents.get(file, ())]
    size = checkpoint.state_map.block_bytes
    for fragment, _ in held:
        if fragment.crc32 is None:
            continue
        for index, expected in enumerate(fragment.blocks):
            low = index * size
            length = min(size, fragment.num_bytes - low)
            found.append(_Range(fragment.offset_bytes + low, length, expected))
    return sorted(found, key=lambda one: one.low)


def _end(fragment: Fragment) -> int:
    return fragment.offset_bytes + fragment.num_bytes


def _meets(fragment: Fragment, one: _Range) -> bool:
    return fragment.offset_bytes < one.high and _end(fragment) > one.low


def _crc32(checkpoint: Checkpoint, path: str, one: _Range) -> int:
    value = 0
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, one.high - one.low)))
    for low in range(one.low, one.high, _CHUNK_BYTES):
        part = buffer[: min(_CHUNK_BYTES, one.high - low)]
        checkpoint.store.read_ranges(path, [(low, (part,))])
        value = crc32(part, value)
    return value


def _differing(checkpoint: Checkpoint, broken: set[TensorKey]) -> Iterator[Problem]:
    """Yield the tensors whose replicas differ, those aside that are damaged anyway."""
    entries = {
        key: replace(
            entry, fragments=tuple(f._replace(crc32=None, blocks=()) for f in entry.fragments)
        )
        for key, entry in checkpoint.state_map.entries.items()
        if key not in broken and any(fragment.replica for fragment in entry.fragments)
    }
    state_map = StateMap(entries=entries, block_bytes=checkpoint.state_map.block_bytes)
    files = tuple(sorted({f.file for entry in entries.values() for f in entry.fragments}))
    job = Job(
        store=checkpoint.store,
        directory=checkpoint.directory,
        state_map=state_map,
        files=files,
        targets=target_files(state_map),
        extents=plan_extents(state_map, files),
        chunk_bytes=BLOCK_BYTES,
        general_bytes=_CHUNK_BYTES,
    )
    worker = Worker(job)
    for number, target in enumerate(job.targets):
        for entry, low in target.tensors:
            try:
                for _ in worker.chunks(Item(number, -1, low, low + entry.num_bytes)):
                    pass
            except CheckpointCorruptError as error:
                key = entry.key
                yield Problem(f"tensors.{key.fqn}.slots.{key.slot}", str(error))
    worker.close()
