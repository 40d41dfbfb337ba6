"""Compares any two checkpoints tensor by tensor, in memory that does not grow.

Whatever formats and layouts they have: both are read as boxes of whole tensors. What equal
checksums of equal bytes prove equal is not read at all.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, Box, Extent, TensorEntry, TensorKey, slabs, span
from ucp_core.inspection.elements import Difference, Tolerance, common_dtype, compare
from ucp_core.native import MEMORY_BYTES_MIN, SlabReader, TensorBox, aligned, check_memory, reading
from ucp_core.numerics import combine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ucp_core.native import Checkpoint

__all__ = ["DiffReport", "TensorDiff", "Tolerance", "ValueDiff", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor that is not the same in both.

    Attributes:
        fqn: Its name.
        slot: Its slot.
        kind: ``only in a``, ``only in b``, ``shape``, ``dtype`` or ``values``.
        dtypes: In either; None where it is missing.
        shapes: In either; None where it is missing.
        num_elements: Of the tensor; 0 unless the values were compared.
        num_different: Elements that differ.
        num_nan: Of those, elements of which one or both are not a number.
        max_abs: Largest difference of the others.
        max_ulp: The same in numbers of the dtype that lie between the two; floats only.
        first_index: Of the first element that differs.
        first_values: That element in either.
    """

    fqn: str
    slot: str
    kind: str
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    num_elements: int = 0
    num_different: int = 0
    num_nan: int = 0
    max_abs: float | None = None
    max_ulp: int | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A small value that is not the same in both.

    Attributes:
        path: Where: ``param_groups[0].lr``, ``extra.scaler.scale``, ``ties.lm_head.weight``.
        in_a: The value there; None where there is none.
        in_b: The same.
        only_in: ``a`` or ``b`` where the other has none; empty otherwise.
    """

    path: str
    in_a: Any
    in_b: Any
    only_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What two checkpoints do not have in common.

    Attributes:
        tensors: Tensors that are not the same, by name.
        values: Small values that are not the same.
        num_equal: Tensors that are the same.
        num_proven: Of those, how many checksums proved equal without reading.
        compared_bytes: Of the first checkpoint, read and compared.
        seconds: How long it took.
    """

    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    num_equal: int
    num_proven: int
    compared_bytes: int
    seconds: float

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.tensors and not self.values

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain values; numbers that JSON has not are texts."""
        document: dict[str, Any] = plain(asdict(self))
        return {"equal": self.equal} | document


class _Pair(NamedTuple):
    """One tensor as either checkpoint has it, by its name in the first."""

    key: TensorKey
    a: TensorEntry | None
    b: TensorEntry | None


class _Cut(NamedTuple):
    """A box of the tensor of a pair."""

    pair: int
    box: Box


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
    """Return what differs between two checkpoints of any formats.

    Small values (groups, extra, ties, roles, step) are compared too, unless ``names`` or
    ``slots`` ask for some tensors only.

    Args:
        a: The first.
        b: The second.
        tolerance: What does not count; None: every bit does.
        names: Only tensors whose fqn has a match of this regular expression.
        slots: Only these slots.
        cast: Compare floats of two dtypes after casting to the coarser one, instead of calling
            the dtype a difference.
        read_all: Read also what the checksums of both say is equal; they tell what was written,
            not what can be read.
        threads: Readers at most.
        memory_bytes: Bound of the buffers.
        progress: Called with the bytes done and the bytes to be compared.

    Raises:
        UcpError: The expression or the bound of memory is wrong.
        CheckpointCorruptError: One of the two is damaged.
        StorageError: A file cannot be read.
    """
    begun = perf_counter()
    check_memory(memory_bytes)
    pairs = list(_pairs(a, b, _pattern(names), slots))
    found = {pair.key: form for pair in pairs if (form := _form(pair, cast=cast)) is not None}
    alike = [pair for pair in pairs if pair.key not in found]
    left = [pair for pair in alike if read_all or not _proven(pair)]
    comparison = _Comparison(a, b, left, tolerance or Tolerance(), memory_bytes, threads)
    with reading(a), reading(b):
        found |= comparison.run(progress)
    return DiffReport(
        tensors=tuple(found[key] for key in sorted(found)),
        values=() if names or slots is not None else tuple(_values(a, b)),
        num_equal=len(pairs) - len(found),
        num_proven=len(alike) - len(left),
        compared_bytes=comparison.total_bytes,
        seconds=perf_counter() - begun,
    )


def _pattern(names: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(names) if names else None
    except re.error as error:
        raise UcpError(f"{names!r} is not a regular expression: {error}", names=names) from error


def _pairs(
    a: Checkpoint, b: Checkpoint, names: re.Pattern[str] | None, slots: Collection[str] | None
) -> Iterator[_Pair]:
    """Yield all tensors; where one side has a tied name, the other may have a tensor of its own."""
    for key in sorted({*a.state_map.entries, *b.state_map.entries}):
        if (names and not names.search(key.fqn)) or (slots is not None and key.slot not in slots):
            continue
        yield _Pair(key, _entry(a, key), _entry(b, key))


def _entry(checkpoint: Checkpoint, key: TensorKey) -> TensorEntry | None:
    entries = checkpoint.state_map.entries
    owner = checkpoint.manifest.ties.get(key.fqn)
    if key in entries or owner is None or key.slot != "weight":
        return entries.get(key)
    return entries.get(TensorKey(owner, key.slot))


def _form(pair: _Pair, *, cast: bool) -> TensorDiff | None:
    """Return what differs before any element is looked at."""
    kind = ""
    if pair.a is None or pair.b is None:
        kind = "only in b" if pair.a is None else "only in a"
    elif pair.a.shape != pair.b.shape:
        kind = "shape"
    elif pair.a.dtype != pair.b.dtype and not (cast and common_dtype(pair.a.dtype, pair.b.dtype)):
        kind = "dtype"
    return _described(pair, kind) if kind else None


def _described(pair: _Pair, kind: str, found: Difference | None = None) -> TensorDiff:
    shape = pair.a.shape if pair.a else ()
    facts: dict[str, Any] = {}
    if found is not None:
        facts = {
            "num_elements": prod(shape),
            "num_different": found.num_different,
            "num_nan": found.num_nan,
            "max_abs": found.max_abs,
            "max_ulp": found.max_ulp,
            "first_index": _index(found.first, shape),
            "first_values": found.values,
        }
    return TensorDiff(
        fqn=pair.key.fqn,
        slot=pair.key.slot,
        kind=kind,
        dtypes=(pair.a.dtype if pair.a else None, pair.b.dtype if pair.b else None),
        shapes=(pair.a.shape if pair.a else None, pair.b.shape if pair.b else None),
        **facts,
    )


def _index(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        position, place = divmod(position, extent)
        index.insert(0, place)
    return tuple(index)


def _proven(pair: _Pair) -> bool:
    """Return whether checksums prove both equal: of the same bytes in the same order."""
    assert pair.a is not None, "both are there"
    assert pair.b is not None, "both are there"
    if pair.a.dtype != pair.b.dtype:
        return False
    value = _whole_crc32(pair.a)
    return value is not None and value == _whole_crc32(pair.b)


def _whole_crc32(entry: TensorEntry) -> int | None:
    """Return the crc32 of all bytes of a tensor, if those of its fragments combine to it."""
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
    """Reads both checkpoints group by group and joins what is found."""

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
        # Two buffers and the scratch of reading each for every thread.
        self._slab_bytes = memory_bytes // self._threads // 4
        self._readers: SimpleQueue[tuple[SlabReader, SlabReader]] = SimpleQueue()
        seen: tuple[set[tuple[str, Extent]], ...] = set(), set()
        for _ in range(self._threads):
            one = SlabReader(a, self._slab_bytes, seen[0])
            self._readers.put((one, SlabReader(b, self._slab_bytes, seen[1])))
        self.total_bytes = sum(pair.a.num_bytes for pair in pairs if pair.a)

    def run(self, progress: Callable[[int, int], None] | None) -> dict[TensorKey, TensorDiff]:
        """Return the pairs whose values differ."""
        found: dict[int, Difference] = {}
        done_bytes = 0
        groups = list(_groups(self._cuts(), self._bytes, self._slab_bytes))
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ucp-diff") as pool:
            for group, differences in zip(groups, pool.map(self._group, groups), strict=True):
                for (number, _), difference in zip(group, differences, strict=True):
                    if difference is not None:
                        known = found.get(number)
                        found[number] = known.joined(difference) if known else difference
                done_bytes += sum(self._bytes(piece)[0] for piece in group)
                if progress is not None:
                    progress(done_bytes, self.total_bytes)
        return {
            self._pairs[number].key: _described(self._pairs[number], "values", difference)
            for number, difference in found.items()
        }

    def _cuts(self) -> Iterator[_Cut]:
        for number, (_, a, b) in enumerate(self._pairs):
            assert a is not None, "both are there"
            assert b is not None, "both are there"
            bound = max(1, self._slab_bytes // max(DTYPE_BYTES[a.dtype], DTYPE_BYTES[b.dtype]))
            for box in slabs(Box.full(a.shape), bound):
                yield _Cut(number, box)

    def _pieces(self, one: _Cut) -> tuple[TensorBox, TensorBox]:
        _, a, b = self._pairs[one.pair]
        assert a is not None, "both are there"
        assert b is not None, "both are there"
        return TensorBox(a, one.box), TensorBox(b, one.box)

    def _bytes(self, one: _Cut) -> tuple[int, int]:
        a, b = self._pieces(one)
        return a.num_bytes, b.num_bytes

    def _group(self, group: Sequence[_Cut]) -> list[Difference | None]:
        readers = self._readers.get()
        try:
            pairs = [self._pieces(one) for one in group]
            slabs = zip(
                readers[0].read([a for a, _ in pairs]),
                readers[1].read([b for _, b in pairs]),
                strict=True,
            )
            return [
                self._compared(one.box, a.data, b.data, a.piece, b.piece)
                for one, (a, b) in zip(group, slabs, strict=True)
            ]
        finally:
            self._readers.put(readers)

    def _compared(
        self, box: Box, one: memoryview, two: memoryview, a: TensorBox, b: TensorBox
    ) -> Difference | None:
        found = compare(one, two, (a.entry.dtype, b.entry.dtype), self._tolerance)
        if found is None:
            return None
        # Boxes are runs of the whole tensor's memory.
        first, _ = span(box, Box.full(a.entry.shape))
        return found._replace(first=first + found.first)


def _groups(
    cuts: Iterable[_Cut], bytes_of: Callable[[_Cut], tuple[int, int]], bound: int
) -> Iterator[list[_Cut]]:
    """Yield runs of boxes that fit the buffers of both sides."""
    group: list[_Cut] = []
    used = [0, 0]
    for one in cuts:
        sizes = [aligned(num_bytes) for num_bytes in bytes_of(one)]
        if group and any(u + s > bound for u, s in zip(used, sizes, strict=True)):
            yield group
            group, used = [], [0, 0]
        group.append(one)
        used = [u + s for u, s in zip(used, sizes, strict=True)]
    if group:
        yield group


def _values(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDiff]:
    yield from _differing("param_groups", _groups_of(a), _groups_of(b))
    yield from _differing("extra", a.extra, b.extra)
    for name in ("ties", "roles", "step"):
        yield from _differing(name, getattr(a.manifest, name), getattr(b.manifest, name))


def _groups_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the groups; the order of the names in one means nothing."""
    return [
        {**group, "params": dict.fromkeys(group.get("params", ()), True)}
        for group in checkpoint.param_groups
    ]


def _differing(path: str, one: Any, two: Any) -> Iterator[ValueDiff]:
    """Yield the leaves of two trees that are not the same."""
    in_one, in_two = _members(one), _members(two)
    if in_one is None or in_two is None:
        # Truth values equal 0 and 1, and NaN not itself.
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


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and value - value != 0):
        return str(value)
    return value
