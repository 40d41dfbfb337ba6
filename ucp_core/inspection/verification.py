"""Read every byte of a checkpoint and report what has changed since it was written."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from ucp_core.conversion import differing_replicas
from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError, Problem, StorageError
from ucp_core.geometry import Fragment, StateMap, TensorKey, prove_entry
from ucp_core.manifest import Kind, from_bytes
from ucp_core.native import MANIFEST_NAME, Checkpoint, rank_name, reading
from ucp_core.reading import crc32_of
from ucp_core.storage import join

#: A tensor and one of its fragments.
_Held: TypeAlias = "tuple[TensorKey, Fragment]"
_TENSORS_NAMED_MAX = 4


class _ChecksumRange(NamedTuple):
    """Bytes of a file and their checksum; None if there is none."""

    low: int
    num_bytes: int
    crc32: int | None

    @property
    def high(self) -> int:
        return self.low + self.num_bytes


def verify(
    checkpoint: Checkpoint, *, progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Return every problem of the checkpoint: missing files, wrong sizes, any flipped byte, holes.

    Args:
        checkpoint: A foreign one is verified by the checksums of its own format, and its replicas
            are compared; bytes without a checksum (``unchecked_bytes``) are only read.
        progress: Called with the bytes done and the bytes of all files.
    """
    try:
        with reading(checkpoint):
            holes = _holes(checkpoint)
            if checkpoint.manifest.kind is Kind.FOREIGN:
                found = _foreign_problems(checkpoint, set(holes), progress)
            else:
                found = _native_problems(checkpoint, progress)
            return [*holes.values(), *found]
    except CheckpointNotFoundError as error:
        return [Problem(MANIFEST_NAME, str(error))]


def _holes(checkpoint: Checkpoint) -> dict[TensorKey, Problem]:
    """Return the tensors whose fragments do not hold each element exactly once."""
    found: dict[TensorKey, Problem] = {}
    for key, entry in checkpoint.state_map.entries.items():
        try:
            prove_entry(entry)
        except CheckpointCorruptError as error:
            found[key] = Problem(_path(key), str(error))
    return found


def _path(key: TensorKey) -> str:
    return f"tensors.{key.fqn}.slots.{key.slot}"


def _native_problems(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] | None
) -> Iterator[Problem]:
    yield from _document_problems(checkpoint)
    held = _held(checkpoint.state_map)
    total = sum(entry.num_bytes for entry in checkpoint.manifest.files.values())
    done = 0
    for name, file in sorted(checkpoint.manifest.files.items()):
        path = join(checkpoint.directory, name)
        try:
            size = checkpoint.store.size(path)
        except StorageError as error:
            yield Problem(name, str(error))
            continue
        if size != file.num_bytes:
            yield Problem(name, f"has {size} bytes, but {file.num_bytes} were written")
        elif crc32_of(checkpoint.store, path, 0, size) != file.crc32:
            inside = held.get(name, [])
            damaged = [
                _damage(name, each, inside)
                for each in _blocks(checkpoint, inside)
                if _is_damaged(checkpoint, name, each)
            ]
            yield from damaged or [Problem(name, "is damaged outside of its tensors")]
        done += file.num_bytes
        if progress is not None:
            progress(done, total)


def _document_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Read the manifest again, and the rank records from which it was merged."""
    names = [MANIFEST_NAME]
    if checkpoint.manifest.kind is Kind.DISTRIBUTED:
        ranks = range(checkpoint.manifest.world_size)
        names += [f"{rank_name(checkpoint.attempt, rank)}.json" for rank in ranks]
    for name in names:
        try:
            from_bytes(checkpoint.store.read(join(checkpoint.directory, name)), where=name)
        except (CheckpointCorruptError, StorageError) as error:
            yield Problem(name, str(error))


def _foreign_problems(
    checkpoint: Checkpoint,
    broken: set[TensorKey],
    progress: Callable[[int, int], None] | None,
) -> Iterator[Problem]:
    """Yield missing and short files, wrong checksums, and replicas that differ.

    ``broken`` tensors are known to be wrong: their replicas are not compared.
    """
    state_map = checkpoint.state_map
    held = _held(state_map)
    ranges = {
        file: sorted(
            [
                *(_ChecksumRange(*extent) for extent in state_map.extents.get(file, ())),
                *_blocks(checkpoint, held.get(file, [])),
                *_unchecked(checkpoint, file, held.get(file, [])),
            ],
            key=lambda one: one.low,
        )
        for file in sorted({*held, *state_map.extents})
    }
    total = sum(each.num_bytes for found in ranges.values() for each in found)
    done = 0
    for file, checked in ranges.items():
        inside = held.get(file, [])
        ends = [each.high for each in checked] + [_end(fragment) for _, fragment in inside]
        try:
            size = checkpoint.store.size(join(checkpoint.directory, file))
            problem = f"has {size} bytes, its tensors reach to {max(ends)}"
            is_whole = size >= max(ends)
        except StorageError as error:
            problem, is_whole = str(error), False
        if not is_whole:
            yield Problem(file, problem)
            broken |= {key for key, _ in inside}
            continue
        for each in checked:
            if _is_damaged(checkpoint, file, each):
                yield _damage(file, each, inside)
                broken |= {key for key, _ in _within(each, inside)}
            done += each.num_bytes
            if progress is not None:
                progress(done, total)
    for key, differs in differing_replicas(checkpoint, set(state_map.entries) - broken):
        yield Problem(_path(key), str(differs))


def _held(state_map: StateMap) -> dict[str, list[_Held]]:
    """Return what each file holds."""
    held: dict[str, list[_Held]] = {}
    for key, entry in state_map.entries.items():
        for fragment in entry.fragments:
            held.setdefault(fragment.file, []).append((key, fragment))
    return held


def _end(fragment: Fragment) -> int:
    return fragment.offset_bytes + fragment.num_bytes


def _blocks(checkpoint: Checkpoint, inside: Iterable[_Held]) -> Iterator[_ChecksumRange]:
    """Yield the blocks of fragments that have checksums of their own."""
    block_bytes = checkpoint.state_map.block_bytes
    for _, fragment in inside:
        for index, expected in enumerate(fragment.blocks):
            low = index * block_bytes
            size = min(block_bytes, fragment.num_bytes - low)
            yield _ChecksumRange(fragment.offset_bytes + low, size, expected)


def _is_damaged(checkpoint: Checkpoint, file: str, one: _ChecksumRange) -> bool:
    path = join(checkpoint.directory, file)
    found = crc32_of(checkpoint.store, path, one.low, one.num_bytes)
    return one.crc32 is not None and found != one.crc32


def _within(one: _ChecksumRange, inside: Iterable[_Held]) -> list[_Held]:
    return [
        (key, fragment)
        for key, fragment in inside
        if fragment.offset_bytes < one.high and _end(fragment) > one.low
    ]


def _damage(file: str, one: _ChecksumRange, inside: Iterable[_Held]) -> Problem:
    named = [f"{key} box {fragment.box}" for key, fragment in _within(one, inside)]
    whose = f": {', '.join(sorted(named)[:_TENSORS_NAMED_MAX])}" if named else ""
    return Problem(file, f"is damaged in bytes {one.low} to {one.high}{whose}")


def unchecked_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes of tensors have no checksum in the checkpoint's format."""
    return sum(
        one.num_bytes
        for file, inside in _held(checkpoint.state_map).items()
        for one in _unchecked(checkpoint, file, inside)
    )


def _unchecked(
    checkpoint: Checkpoint, file: str, inside: Iterable[_Held]
) -> Iterator[_ChecksumRange]:
    """Yield the bytes of the fragments that have no checksum of their own and lie in no extent."""
    extents = sorted(checkpoint.state_map.extents.get(file, ()))
    for _, fragment in inside:
        index = bisect_right(extents, fragment.offset_bytes, key=lambda e: e.offset_bytes) - 1
        end = extents[index].offset_bytes + extents[index].num_bytes if index >= 0 else 0
        if fragment.crc32 is None and _end(fragment) > end:
            yield _ChecksumRange(fragment.offset_bytes, fragment.num_bytes, None)
