"""Refuses a file of a rank that lies under another rank's name.

DeepSpeed writes no rank into such a file. Equal content shows a copy, since data-parallel ranks
hold different parts. Under stage 3 two swapped files are each sound, but the last rank has padding
behind its part of a parameter that the ranks do not divide. The moments of padding are zeros,
because no gradient came there. If the last rank has other moments there and another rank has zeros,
the two were swapped. Only the first rank writes down the ties.
"""

from __future__ import annotations

from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.shared import refuse_equal
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucp_core.formats.deepspeed.reading.partitions import RankState
    from ucp_core.formats.deepspeed.reading.topology import Native
    from ucp_core.formats.deepspeed.reading.zero import Stage
    from ucp_core.storage import Store
    from ucp_core.torch_files import TensorRef

#: Parameters to compare, of which the last rank has less than the others.
_COMPARED_MAX = 8


def refuse_copied(store: Store, directory: str, states: Sequence[RankState]) -> None:
    """Check that no two data-parallel ranks of one model-parallel rank have the same file.

    Raises:
        CheckpointCorruptError: Two are equal, and hold more than a few numbers repeated.
    """
    held = [list(_tensors(state)) for state in states]
    refuse_equal(store, directory, held, "masters and optimizer state")


def _tensors(state: RankState) -> Iterator[TensorRef]:
    for part in state.partitions:
        yield part.weight
        for _, ref in sorted(part.slots.items()):
            yield ref


def refuse_swapped(store: Store, directory: str, stage: Stage) -> None:
    """Check that the last rank's optimizer file is not under the name of another one.

    Both signs are needed: weight decay can leave moments in padding, and rows that no sample
    touched are zero.

    Args:
        stage: The files of one model-parallel rank, each sound by itself.

    Raises:
        CheckpointCorruptError: Two ranks' files were swapped.
    """
    last = len(stage.states) - 1
    spots = list(islice(_paddings(stage), _COMPARED_MAX))
    if not spots or _are_zero(store, directory, stage, last, spots):
        return
    for rank in range(last):
        if _are_zero(store, directory, stage, rank, spots):
            mine, other = (stage.states[r].partitions[0].file for r in (last, rank))
            path = join(directory, mine)
            raise CheckpointCorruptError(
                f"{path} has moments where the last of {last + 1} ranks has padding, and {other} "
                "has none there: the two were swapped; swap them back or use another checkpoint",
                path=path,
                file=mine,
                swapped_with=other,
            )


def refuse_swapped_models(native: Native) -> None:
    """Raise ``CheckpointCorruptError`` if another model file than the first has the ties."""
    first = native.model[0, 0]
    files = [file for (_, mp), file in sorted(native.model.items()) if mp == 0]
    tied = [file for file in files if native.files.trees[file].get("shared_params")]
    if tied and first not in tied:
        path = native.files.path(first)
        raise CheckpointCorruptError(
            f"{path} has no shared_params, which only the first rank writes, but {tied[0]} has: "
            "the two were swapped; swap them back or use another checkpoint",
            path=path,
            file=first,
            swapped_with=tied[0],
        )


def _paddings(stage: Stage) -> Iterator[tuple[int, int, int]]:
    """Yield where the last rank has padding: number of the sub-group, start, stop."""
    ranks = len(stage.states)
    shapes = iter([shape for group in stage.shapes for shape in group.values()])
    for number, part in enumerate(stage.states[-1].partitions):
        start, size = 0, part.weight.shape[0]
        while start < size:
            total = prod(next(shapes))
            piece = -(-total // ranks)
            held = max(0, total - (ranks - 1) * piece)
            if held < piece:
                yield number, start + held, start + piece
            start += piece


def _are_zero(
    store: Store, directory: str, stage: Stage, rank: int, spots: list[tuple[int, int, int]]
) -> bool:
    """Return whether all moments in these places are zero; they are read at once."""
    ranges: dict[str, dict[int, bytearray]] = {}
    for number, start, stop in spots:
        for ref in stage.states[rank].partitions[number].slots.values():
            size = DTYPE_BYTES[ref.dtype]
            place = ranges.setdefault(ref.file, {})
            place[ref.offset_bytes + start * size] = bytearray((stop - start) * size)
    for file, places in ranges.items():
        wanted = [(low, (memoryview(data),)) for low, data in sorted(places.items())]
        store.read_ranges(join(directory, file), wanted)
    return not any(any(data) for places in ranges.values() for data in places.values())
