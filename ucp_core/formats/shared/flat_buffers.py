"""Finds parameters in the flat buffers of Megatron's distributed optimizer.

Buffers hold no names. Megatron fills them with the parameters in the reverse order of its modules,
each at the next multiple of 64 elements in its bucket. So the layout can be computed, and proven by
the buffer's fp32 weights, which round to the model's weights: a few elements at either end of each
piece of a parameter. Parameters in no buffer were not trained.

Sources: ``_ParamAndGradBuffer`` in ``param_and_grad_buffer.py`` of megatron-core 0.5 to 0.16,
``_compute_per_buffer_param_layout`` in ``distrib_optimizer.py`` since then.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ucp_core.formats.shared.values import whole_tensor
from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, TensorEntry, TensorKey
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

#: Elements to compare at either end; parameters that agree in these count as equal.
_SAMPLE = 64
_HALVES = ("F16", "BF16")


class Param(NamedTuple):
    """One rank's part of a parameter: fragments, one after the other along dim 0."""

    key: str
    dtype: str
    fragments: tuple[Fragment, ...]
    is_replica: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements that the rank holds."""
        return sum(box.num_elements for box in self.boxes)

    @property
    def boxes(self) -> list[Box]:
        """Return the boxes of the fragments in the model's tensor."""
        return [fragment.box for fragment in self.fragments]

    @property
    def num_experts(self) -> int:
        """Return how many experts it holds; above 1 only if they are one parameter."""
        return max(box.shape[-3] if len(box.start) > 2 else 1 for box in self.boxes)  # noqa: PLR2004


class Buffer:
    """A flat tensor of one slot of many parameters."""

    def __init__(self, store: Store, directory: str, entry: TensorEntry) -> None:
        self._store = store
        self._directory = directory
        self.dtype = entry.dtype
        (self.num_elements,) = entry.shape
        self.fragments = entry.fragments
        self._starts = [fragment.box.start[0] for fragment in entry.fragments]

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, str, int]]:
        """Yield the parts of ``[start, stop)``: bounds, file, and byte of the first element."""
        index = max(0, bisect_right(self._starts, start) - 1)
        for fragment in self.fragments[index:]:
            first = fragment.box.start[0]
            low, high = max(start, first), min(stop, fragment.box.stop[0])
            if first >= stop:
                break
            if low < high:
                at = fragment.offset_bytes + (low - first) * DTYPE_BYTES[self.dtype]
                yield low, high, fragment.file, at

    def holds(self, start: int, param: Param) -> bool:
        """Return whether the masters from element ``start`` on round to a parameter's weights."""
        if start + param.num_elements > self.num_elements:
            return False
        for fragment in param.fragments:
            count = fragment.box.num_elements
            sample = min(_SAMPLE, count)
            for skip in {0, count - sample}:
                if not self._agrees(start + skip, param.dtype, fragment, skip, sample):
                    return False
            start += count
        return True

    def _agrees(self, low: int, dtype: str, weights: Fragment, first: int, count: int) -> bool:
        """Return whether masters from ``low`` on round to ``count`` weights from ``first`` on."""
        size, itemsize = DTYPE_BYTES[self.dtype], DTYPE_BYTES[dtype]
        masters = b"".join(
            self._read(file, at, (end - begin) * size)
            for begin, end, file, at in self.cut(low, low + count)
        )
        begin = weights.offset_bytes + first * itemsize
        if len(masters) != count * size:
            return False
        from ucp_core.numerics import cast  # needs numpy, which other checkpoints do not

        weights_read = self._read(weights.file, begin, count * itemsize)
        return bytes(cast(memoryview(masters), self.dtype, dtype)) == weights_read

    def _read(self, file: str, offset_bytes: int, num_bytes: int) -> bytes:
        return self._store.read_range(join(self._directory, file), offset_bytes, num_bytes)


def is_master_of(
    store: Store, directory: str, masters: TensorRef, start: int, weight: TensorRef
) -> bool:
    """Return whether the flat masters from element ``start`` on round to ``weight``."""
    if masters.dtype != weight.dtype and (masters.dtype != "F32" or weight.dtype not in _HALVES):
        return False
    if weight.byte_strides is not None or masters.byte_strides is not None:
        return False
    key = TensorKey("", "weight")
    flat = whole_tensor(key, masters, (masters.num_elements,))
    whole = whole_tensor(key, weight)
    return Buffer(store, directory, flat).holds(start, Param("", weight.dtype, whole.fragments))


#: Parameters begin at multiples of this many elements.
_ALIGNMENT = 64


class Place(NamedTuple):
    """The start of a parameter: the bucket, and the element in it."""

    bucket: int
    start: int


def lay_out(
    sizes: Sequence[int],
    buckets: Sequence[int],
    holds: Callable[[int, Place], bool],
    *,
    refused: Callable[[int | None, str], Exception],
    is_joined: bool = False,
) -> dict[int, Place]:
    """Return the place of each parameter that was trained, by its number.

    Ranks that share the saving may write the parameters in a different order from the modules'.
    Then a place must fit only one parameter.

    Args:
        sizes: Number of elements of each parameter, in the order of the modules.
        buckets: Number of elements of each bucket. Padding can follow its last parameter.
        holds: Returns whether a parameter's weights are at a place, which has room for it.
        refused: Makes the error from the number of a parameter, if one is to blame, and the reason.
        is_joined: Whether buckets follow one another without padding, so that only their total size
            is known.
    """
    places: dict[int, Place] = {}
    left = list(reversed(range(len(sizes))))
    for bucket, length in enumerate(buckets):
        first = end = 0
        while True:
            start = first + -(-(end - first) // _ALIGNMENT) * _ALIGNMENT
            if (end if is_joined else start) >= length:
                break
            starts = dict.fromkeys((start, end) if is_joined else (start,))
            found = next(
                (
                    (number, Place(bucket, at))
                    for number in left
                    for at in starts
                    if at + sizes[number] <= length and holds(number, Place(bucket, at))
                ),
                None,
            )
            if found is None:
                why = f"no parameter is at element {start} of {length}"
                raise refused(left[0] if left else None, why)
            number, place = found
            first = first if place.start == start else place.start
            places[number] = place
            left.remove(number)
            end = place.start + sizes[number]
    in_order = list(places) == sorted(places, reverse=True)
    for number, place in places.items():
        for other in left if in_order else {*range(len(sizes))} - {number}:
            if place.start + sizes[other] <= buckets[place.bucket] and holds(other, place):
                raise refused(other, "others have the same weights")
    return places
