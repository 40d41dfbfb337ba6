"""Training state as a map: which boxes of which tensor are where, and proof of coverage. Pure.

A ``StateMap`` describes a checkpoint, a set of rank records, or what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry.boxes import Box, packed_strides, reach
from ucp_core.numerics import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Bytes of one element by safetensors' name of the dtype.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
#: How many ways of cutting tensors to remember; a layer has about ten.
_CUTS_KEPT = 64


class TensorKey(NamedTuple):
    """One logical tensor of the state."""

    fqn: str  #: Fully qualified name of the parameter or buffer.
    slot: str  #: ``weight``, or the optimizer's name for its tensor (``exp_avg``, ...).

    def __str__(self) -> str:
        """Return ``fqn (slot)``."""
        return f"{self.fqn} ({self.slot})"


class Fragment(NamedTuple):
    """The bytes of one box in one file."""

    box: Box  #: The elements, in coordinates of the whole tensor.
    file: str  #: Name in the checkpoint's directory.
    offset_bytes: int  #: Offset of the first element in the file.
    num_bytes: int  #: Bytes from there to the end of the last element.
    #: Checksum of all its bytes; None if a foreign format has no checksum of this range.
    crc32: int | None
    #: crc32 of each block of the map's ``block_bytes``; the last block may be shorter. Empty if
    #: ``crc32`` is None.
    blocks: tuple[int, ...]
    replica: bool = False  #: Another fragment without this flag holds the same elements.
    #: Bytes between neighbours along each dim; None if the box is C-contiguous.
    strides: tuple[int, ...] | None = None
    copy: int = 0  #: Number of the independently updated copy of the tensor.

    def byte_strides(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes between neighbours along each dim, also for a C-contiguous box."""
        if self.strides is not None:
            return self.strides
        return packed_strides(self.box.shape, itemsize)


class TableTensor(NamedTuple):
    """A logical tensor of a table."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]


class Extent(NamedTuple):
    """Bytes of a foreign file with one checksum, such as a record of a torch zip."""

    offset_bytes: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One logical tensor and the fragments that hold it, in order of their boxes."""

    key: TensorKey
    dtype: str  #: safetensors' name.
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    #: Above 1: number of copies that were updated independently. Each covers the tensor, whose
    #: value is their mean.
    copies: int = 1

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMap:
    """Tensors by key."""

    entries: Mapping[TensorKey, TensorEntry]
    block_bytes: int  #: Block size of the fragments' checksums.
    #: By file: the ranges for which a foreign format has checksums.
    extents: Mapping[str, tuple[Extent, ...]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors, counting replicas once."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def tensors(self) -> Mapping[TensorKey, TensorEntry | TableTensor]:
        """Return key, dtype and shape of every tensor; unlike ``entries`` it makes no fragments."""
        table = getattr(self.entries, "table", None)
        return self.entries if table is None else table.tensors.by_key

    def prove_coverage(self) -> None:
        """Check that fragments without replicas hold every element of every tensor exactly once.

        Raises:
            UncoveredRegionError: Names the first tensor, box and files that are wrong.
            CheckpointCorruptError: A fragment contradicts its tensor.
        """
        table = getattr(self.entries, "table", None)
        if table is not None:
            table.prove_coverage()
            return
        for entry in self.entries.values():
            prove_entry(entry)


def prove_entry(entry: TensorEntry) -> None:
    """Check one tensor and each of its copies; see ``StateMap.prove_coverage``.

    Disjoint boxes inside the tensor whose sizes add up to its size cover it. That takes n log n for
    n fragments along one dim, and less for a tensor cut like an earlier one.
    """
    whole, itemsize = Box.full(entry.shape), DTYPE_BYTES[entry.dtype]
    sizes = _sizes_inside(entry.shape, tuple([fragment.box for fragment in entry.fragments]))
    copies: list[list[Fragment]] = [[] for _ in range(entry.copies)]
    for fragment, size in zip(entry.fragments, sizes, strict=True):
        is_right = fragment.strides is None and fragment.num_bytes == size * itemsize
        if not is_right or not 0 <= fragment.copy < entry.copies:
            _check_fragment(entry, whole, fragment)
        if not fragment.replica:
            copies[fragment.copy].append(fragment)
    for number, fragments in enumerate(copies):
        _prove_once(entry, whole, fragments, f" of copy {number}" if entry.copies > 1 else "")


@lru_cache(maxsize=_CUTS_KEPT)
def _sizes_inside(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[int, ...]:
    """Return the number of elements of every box; -1 for a box that does not fit the tensor."""
    whole = Box.full(shape)

    def size(box: Box) -> int:
        is_box = len(box.start) == len(box.stop) == len(shape) and all(map(le, *box))
        return box.num_elements if is_box and whole.contains(box) else -1

    return tuple(map(size, boxes))


def _check_fragment(entry: TensorEntry, whole: Box, fragment: Fragment) -> None:
    """Check that a fragment fits the tensor."""
    start, stop = fragment.box
    is_box = len(start) == len(stop) == len(entry.shape) and all(map(le, start, stop))
    if not is_box or not whole.contains(fragment.box):
        raise UncoveredRegionError(
            f"{entry.key}: box {fragment.box} of file {fragment.file} reaches outside the "
            f"tensor of shape {list(entry.shape)}",
            **_facts(entry, fragment.box, fragment.file),
        )
    if not 0 <= fragment.copy < entry.copies:
        raise CheckpointCorruptError(
            f"{entry.key}: box {fragment.box} of file {fragment.file} belongs to copy "
            f"{fragment.copy}, the tensor has {entry.copies}",
            **_facts(entry, fragment.box, fragment.file),
        )
    strides = fragment.strides
    if strides is not None and (len(strides) != len(entry.shape) or min(strides, default=0) < 0):
        raise CheckpointCorruptError(
            f"{entry.key}: box {fragment.box} of file {fragment.file} has strides "
            f"{list(strides)}: there must be one for each dim, none negative",
            **_facts(entry, fragment.box, fragment.file),
        )
    itemsize = DTYPE_BYTES[entry.dtype]
    num_bytes = fragment.box.num_elements * itemsize
    if strides is not None and num_bytes:
        num_bytes = reach(fragment.box, fragment.box, strides, itemsize)[1]
    if num_bytes != fragment.num_bytes:
        raise CheckpointCorruptError(
            f"{entry.key}: box {fragment.box} of {entry.dtype} has {num_bytes} bytes, file "
            f"{fragment.file} is said to hold {fragment.num_bytes} for it",
            **_facts(entry, fragment.box, fragment.file),
        )


def _prove_once(entry: TensorEntry, whole: Box, primary: Sequence[Fragment], of: str) -> None:
    """Check that ``primary`` holds every element exactly once; ``of`` names the copy."""
    boxes = tuple([fragment.box for fragment in primary])
    clash = _overlap(len(entry.shape), boxes)
    if clash is not None:
        one, two = (primary[number] for number in clash)
        both = one.box.intersect(two.box)
        raise UncoveredRegionError(
            f"{entry.key}: box {both}{of} is held twice, in {one.file} and in {two.file}, and "
            "neither is declared a replica",
            **_facts(entry, both, one.file, two.file),
        )
    if sum(_sizes_inside(entry.shape, boxes)) != prod(entry.shape):
        hole = _hole(whole, primary)
        raise UncoveredRegionError(
            f"{entry.key}: box {hole}{of} of shape {list(entry.shape)} is in none of the files "
            f"{_names(primary)}",
            **_facts(entry, hole, *(fragment.file for fragment in primary)),
        )


@lru_cache(maxsize=_CUTS_KEPT)
def _overlap(ndim: int, boxes: tuple[Box, ...]) -> tuple[int, int] | None:
    """Return two boxes that share an element, or None; sweep along ``sweep_dim``."""
    filled = [number for number, box in enumerate(boxes) if not box.is_empty]
    if len(filled) <= 1:
        return None
    if ndim == 0:
        return filled[0], filled[1]
    dim = sweep_dim([boxes[number] for number in filled], ndim)
    active: list[int] = []
    for number in sorted(filled, key=lambda n: boxes[n].start[dim]):
        box = boxes[number]
        active = [other for other in active if boxes[other].stop[dim] > box.start[dim]]
        for other in active:
            if boxes[other].intersect(box) is not None:
                return other, number
        active.append(number)
    return None


def copies_differ(key: TensorKey, box: Box, one: str, other: str) -> CheckpointCorruptError:
    """Return the error for two files with different values of the same elements."""
    return CheckpointCorruptError(
        f"{key}: box {box} has different values in {one} and in {other}: ranks that hold the same "
        "weight must hold the same values. Copies that drifted apart: broadcast them from one rank "
        "before you save. Parts of one tensor, such as a rank's experts: make them a DTensor",
        fqn=key.fqn,
        slot=key.slot,
        box=box,
        files=[one, other],
    )


def sweep_dim(boxes: Sequence[Box], ndim: int) -> int:
    """Return the dim along which the fewest boxes overlap at any place.

    The dim with the most starts would be wrong: ranges of a flattened tensor begin in any column,
    but most of them have all columns.
    """

    def mean(dim: int) -> float:
        low = min(box.start[dim] for box in boxes)
        high = max(box.stop[dim] for box in boxes)
        return sum(box.stop[dim] - box.start[dim] for box in boxes) / max(high - low, 1)

    return min(range(ndim), key=mean)


def _hole(whole: Box, fragments: Sequence[Fragment]) -> Box | None:
    left = [whole]
    for fragment in fragments:
        left = [rest for box in left for rest in box.subtract(fragment.box)]
    return left[0] if left else None


def _names(fragments: Sequence[Fragment]) -> str:
    return shortened(sorted({fragment.file for fragment in fragments}), 4) or "(none)"


def _facts(entry: TensorEntry, box: Box | None, *files: str) -> dict[str, object]:
    return {"fqn": entry.key.fqn, "slot": entry.key.slot, "box": box, "files": sorted(set(files))}
