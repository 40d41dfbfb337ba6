"""Refuses a file of a rank that is another rank's under a wrong name.

DeepSpeed writes no rank into such a file: what tells it from another one is its name, and what is
in it. Data-parallel ranks hold different parts of the parameters, so two of them with the same
masters and the same moments are one file twice, unless all of that is a few numbers over and over:
zeros of padding, or parameters that were initialised to ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucp_core.formats.shared import refuse_equal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucp_core.formats.deepspeed.reading.partitions import RankState
    from ucp_core.storage import Store
    from ucp_core.torch_files import TensorRef


def refuse_copied(store: Store, directory: str, states: Sequence[RankState]) -> None:
    """Check that the files of data-parallel ranks of one model-parallel rank are not one file.

    Torch's own checksums are compared; nothing is read unless they are equal. Files without them
    are not compared.

    Args:
        store: Where.
        directory: Of the files.
        states: By data-parallel rank.

    Raises:
        CheckpointCorruptError: Two are equal, and more than a few numbers over and over.
    """
    held = [list(_tensors(state)) for state in states]
    refuse_equal(store, directory, held, "masters and optimizer state")


def refuse_copied_frozen(
    store: Store, directory: str, pieces: Iterable[Sequence[TensorRef]]
) -> None:
    """Check the same of stage 3's model files, by the pieces of frozen parameters in them.

    Nothing else in such a file is only one rank's.

    Args:
        store: Where.
        directory: Of the files.
        pieces: By data-parallel rank; no parameter of which every rank has the whole.

    Raises:
        CheckpointCorruptError: As above.
    """
    refuse_equal(store, directory, pieces, "pieces of frozen parameters")


def _tensors(state: RankState) -> Iterator[TensorRef]:
    for part in state.partitions:
        yield part.weight
        for _, ref in sorted(part.slots.items()):
            yield ref
