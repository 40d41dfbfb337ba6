"""Compare two checkpoints of any formats and layouts, tensor by tensor, in bounded memory.

Both are read as boxes of whole tensors. Tensors whose checksums prove them equal are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, Box, Extent, TensorEntry, TensorKey, slabs, span
from ucp_core.inspection.elements import Difference, Tolerance, common_dtype, compare
from ucp_core.native import (
    MEMORY_BYTES_MIN,
    Checkpoint,
    Slab,
    SlabReader,
    TensorBox,
    aligned,
    check_memory,
    reading,
)
from ucp_core.numerics import combine, grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor that differs."""

    fqn: str
    slot: str
    kind: str  #: ``only in a``, ``only in b``, ``shape``, ``dtype`` or ``values``.
    dtypes: tuple[str | None, str | None]  #: In a and b; None where it is missing.
    #: In a and b; None where it is missing.
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    num_elements: int = 0  #: 0 unless values were compared; the same holds for all fields below.
    num_different: int = 0
    num_nan: int = 0  #: How many of these are NaN on either side.
    max_abs: float | None = None  #: Largest difference of the others.
    #: Largest distance of two floats, counted in representable numbers.
    max_ulp: int | None = None
    first_index: tuple[int, ...] | None = None  #: Index of the first element that differs.
    first_values: tuple[Any, Any] | None = None  #: That element in a and b.


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A small value that differs."""

    path: str  #: Such as ``param_groups[0].lr`` or ``extra.scaler.scale``.
    in_a: Any  #: The value in a; None if it is missing.
    in_b: Any  #: The value in b; None if it is missing.
    only_in: str = ""  #: ``a`` or ``b`` if the other checkpoint has none; else empty.


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """How two checkpoints differ."""

    tensors: tuple[TensorDiff, ...]  #: Tensors that differ, by name.
    values: tuple[ValueDiff, ...]  #: Small values that differ.
    num_equal: int
    num_proven: int  #: How many of these were proven equal by their checksums.
    compared_bytes: int  #: Bytes of a that were read and compared.
    seconds: float

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.tensors and not self.values

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        document: dict[str, Any] = json_value(asdict(self))
        return {"equal": self.equal} | document


class _Pair(NamedTuple):
    """A tensor that has the same shape on both sides, by its name in a."""

    key: TensorKey
    a: TensorEntry
    b: TensorEntry


class _PairBox(NamedTuple):
    """A box of a pair of tensors; ``pair`` is the number of the pair."""

    pair: int
    a: TensorBox
    b: TensorBox


def diff(  # noqa: PLR0913 - options that have nothing to do with each other
    a: Checkpoint,
    b: Checkpoint,
    *,
    tolerance: Tolerance | None = None,
    names: str | None = None,
    slots: Collection[str] | None = None,
    cast: bool = False,
    read_all: bool = False,
    threads: int = 2,
    memory_bytes: int = 256 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Return how two checkpoints of any formats differ.

    Small values (groups, extra, ties, roles, step) are compared unless ``names`` or ``slots``
    select tensors.

    Args:
        tolerance: Differences to ignore; None: every bit counts.
        names: Only tensors whose fqn contains a match of this regular expression.
        cast: Compare floats of two dtypes as the coarser one; else the dtype is a difference.
        read_all: Also read tensors that checksums prove equal, to show that they can be read.
        threads: At most this many readers.
        memory_bytes: Limit for the buffers.
        progress: Called with the bytes done and the bytes to compare.

    Raises:
        UcpError: The expression or the memory limit is wrong.
        CheckpointCorruptError: One of the two is damaged.
        StorageError: A file cannot be read.
    """
    begun = perf_counter()
    check_memory(memory_bytes)
    found: dict[TensorKey, TensorDiff] = {}
    pairs: list[_Pair] = []
    for key in _keys(a, b, _pattern(names), slots):
        one, two = _entry(a, key), _entry(b, key)
        kind = _kind(one, two, cast=cast)
        if one is None or two is None or kind:
            found[key] = _described(key, one, two, kind)
        else:
            pairs.append(_Pair(key, one, two))
    left = [pair for pair in pairs if read_all or not _proven(pair)]
    num_proven, num_tensors = len(pairs) - len(left), len(pairs) + len(found)
    comparison = _Comparison(a, b, left, tolerance or Tolerance(), memory_bytes, threads)
    with reading(a), reading(b):
        found |= comparison.run(progress)
    return DiffReport(
        tensors=tuple(found[key] for key in sorted(found)),
        values=() if names or slots is not None else tuple(_values(a, b)),
        num_equal=num_tensors - len(found),
        num_proven=num_proven,
        compared_bytes=comparison.total_bytes,
        seconds=perf_counter() - begun,
    )


def _pattern(names: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(names) if names else None
    except re.error as error:
        raise UcpError(f"{names!r} is not a regular expression: {error}", names=names) from error


def _keys(
    a: Checkpoint, b: Checkpoint, names: re.Pattern[str] | None, slots: Collection[str] | None
) -> list[TensorKey]:
    """Return the selected tensors of both."""
    return [
        key
        for key in sorted({*a.state_map.entries, *b.state_map.entries})
        if (not names or names.search(key.fqn)) and (slots is None or key.slot in slots)
    ]


def _entry(checkpoint: Checkpoint, key: TensorKey) -> TensorEntry | None:
    """Return a tensor; a tied name may be a tensor of its own in the other checkpoint."""
    entries = checkpoint.state_map.entries
    owner = checkpoint.manifest.ties.get(key.fqn)
    if key in entries or owner is None or key.slot != "weight":
        return entries.get(key)
    return entries.get(TensorKey(owner, key.slot))


def _kind(a: TensorEntry | None, b: TensorEntry | None, *, cast: bool) -> str:
    """Return what differs before any element is compared; "" if nothing does."""
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype and not (cast and common_dtype(a.dtype, b.dtype)):
        return "dtype"
    return ""


def _described(
    key: TensorKey,
    a: TensorEntry | None,
    b: TensorEntry | None,
    kind: str,
    found: Difference | None = None,
) -> TensorDiff:
    facts: dict[str, Any] = {}
    if found is not None and a is not None:
        facts = {
            "num_elements": prod(a.shape),
            "num_different": found.num_different,
            "num_nan": found.num_nan,
            "max_abs": found.max_abs,
            "max_ulp": found.max_ulp,
            "first_index": tuple(map(int, np.unravel_index(found.first, a.shape))),
            "first_values": found.values,
        }
    return TensorDiff(
        fqn=key.fqn,
        slot=key.slot,
        kind=kind,
        dtypes=(a.dtype if a else None, b.dtype if b else None),
        shapes=(a.shape if a else None, b.shape if b else None),
        **facts,
    )


def _proven(pair: _Pair) -> bool:
    """Return whether checksums of the same bytes in the same order prove both equal."""
    if pair.a.dtype != pair.b.dtype:
        return False
    value = _whole_crc32(pair.a)
    return value is not None and value == _whole_crc32(pair.b)


def _whole_crc32(entry: TensorEntry) -> int | None:
    """Return the crc32 of a tensor's bytes, if the checksums of its fragments can be combined."""
    if entry.copies > 1:
        return None
    whole = Box.full(entry.shape)
    itemsize = DTYPE_BYTES[entry.dtype]
    value = done = 0
    for fragment in sorted(entry.fragments):
        if fragment.replica or fragment.box.is_empty:
            continue
        if fragment.crc32 is None or fragment.strides is not None:
            return None
        first, last = span(fragment.box, whole)
        if first != done or last - first != fragment.box.num_elements:
            return None
        value = combine(value, fragment.crc32, fragment.box.num_elements * itemsize)
        done = last
    return value if done == prod(entry.shape) else None


class _Comparison:
    """Reads both checkpoints group by group and joins the differences."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        pairs: Sequence[_Pair],
        tolerance: Tolerance,
        memory_bytes: int,
        threads: int,
    ) -> None:
        self._pairs = pairs
        self._tolerance = tolerance
        self._threads = max(1, min(threads, memory_bytes // MEMORY_BYTES_MIN))
        # Each thread has two buffers, each with the scratch memory for reading.
        self._slab_bytes = memory_bytes // self._threads // 4
        self._readers: SimpleQueue[tuple[SlabReader, SlabReader]] = SimpleQueue()
        seen: tuple[set[tuple[str, Extent]], ...] = set(), set()
        for _ in range(self._threads):
            one = SlabReader(a, self._slab_bytes, seen[0])
            self._readers.put((one, SlabReader(b, self._slab_bytes, seen[1])))
        self.total_bytes = sum(pair.a.num_bytes for pair in pairs)

    def run(self, progress: Callable[[int, int], None] | None) -> dict[TensorKey, TensorDiff]:
        """Return the pairs whose values differ."""
        found: dict[int, Difference] = {}
        done_bytes = 0
        # A group fits into the buffers of both sides.
        groups = list(grouped(self._boxes(), _buffer_bytes, self._slab_bytes))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ucp-diff") as pool:
            for group, differences in zip(groups, pool.map(self._group, groups), strict=True):
                for box, difference in zip(group, differences, strict=True):
                    if difference is not None:
                        known = found.get(box.pair)
                        found[box.pair] = known.joined(difference) if known else difference
                done_bytes += sum(box.a.num_bytes for box in group)
                if progress is not None:
                    progress(done_bytes, self.total_bytes)
        return {
            self._pairs[number].key: _described(*self._pairs[number], "values", difference)
            for number, difference in found.items()
        }

    def _boxes(self) -> Iterator[_PairBox]:
        for number, (_, a, b) in enumerate(self._pairs):
            bound = max(1, self._slab_bytes // max(DTYPE_BYTES[a.dtype], DTYPE_BYTES[b.dtype]))
            for box in slabs(Box.full(a.shape), bound):
                yield _PairBox(number, TensorBox(a, box), TensorBox(b, box))

    def _group(self, group: Sequence[_PairBox]) -> list[Difference | None]:
        readers = self._readers.get()
        try:
            one = readers[0].read([box.a for box in group])
            two = readers[1].read([box.b for box in group])
            return [self._compared(a, b) for a, b in zip(one, two, strict=True)]
        finally:
            self._readers.put(readers)

    def _compared(self, a: Slab, b: Slab) -> Difference | None:
        entry = a.piece.entry
        dtypes = (entry.dtype, b.piece.entry.dtype)
        found = compare(a.data, b.data, dtypes, self._tolerance)
        if found is None:
            return None
        # A box is a run of the whole tensor's memory.
        first, _ = span(a.piece.box, Box.full(entry.shape))
        return found._replace(first=first + found.first)


def _buffer_bytes(box: _PairBox) -> int:
    return max(aligned(box.a.num_bytes), aligned(box.b.num_bytes))


def _values(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDiff]:
    yield from _differing("param_groups", _groups_of(a), _groups_of(b))
    yield from _differing("extra", a.extra, b.extra)
    for name in ("ties", "roles", "step"):
        yield from _differing(name, getattr(a.manifest, name), getattr(b.manifest, name))


def _groups_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the groups; the order of names within a group does not count."""
    return [
        {**group, "params": dict.fromkeys(group.get("params", ()), True)}
        for group in checkpoint.param_groups
    ]


def _differing(path: str, one: Any, two: Any) -> Iterator[ValueDiff]:
    """Yield the leaves of two trees that differ."""
    in_one, in_two = _members(one), _members(two)
    if in_one is None or in_two is None:
        # In Python True equals 1, and NaN does not equal itself.
        if repr(one) != repr(two) and (
            one != two or isinstance(one, bool) != isinstance(two, bool)
        ):
            yield ValueDiff(path=path, in_a=one, in_b=two)
        return
    for key in [*in_one, *(key for key in in_two if key not in in_one)]:
        inner = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
        if key not in in_two:
            yield ValueDiff(path=inner, in_a=in_one[key], in_b=None, only_in="a")
        elif key not in in_one:
            yield ValueDiff(path=inner, in_a=None, in_b=in_two[key], only_in="b")
        else:
            yield from _differing(inner, in_one[key], in_two[key])


def _members(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def json_value(value: Any) -> Any:
    """Return ``value`` as JSON; numbers that JSON lacks become text."""
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and value - value != 0):
        return str(value)
    return value
