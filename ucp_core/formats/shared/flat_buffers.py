"""Finds parameters in the flat buffers of Megatron's distributed optimizer. Pure.

Buffers hold no names. Megatron fills them with the parameters in the reverse order of its modules,
each at the next multiple of 64 elements in its bucket. So the layout can be computed, and proven by
the buffer's fp32 weights, which round to the model's weights. Parameters in no buffer were not
trained.

Sources: ``_ParamAndGradBuffer`` in ``param_and_grad_buffer.py`` of megatron-core 0.5 to 0.16,
``_compute_per_buffer_param_layout`` in ``distrib_optimizer.py`` since then.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
