"""Refuses a file of a rank that is another rank's under a wrong name.

Ranks hold different parts of the model, so two of them with the same state are one file twice,
unless all of that is a few numbers over and over: zeros of padding, or parameters that were
initialised to ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ucp_core.errors import CheckpointCorruptError
from ucp_core.geometry import DTYPE_BYTES
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucp_core.storage import Store
    from ucp_core.torch_files import TensorRef

#: What is looked at of a tensor, at its start, in the middle and at its end.
_SAMPLE_BYTES = 64 << 10
#: So many different numbers at most may be the same on two ranks without being a copy: what layers
#: begin with, and padding. Better one copy unnoticed than a sound checkpoint refused.
_NUMBERS_MAX = 16

_Prints: TypeAlias = tuple[tuple[object, ...], ...]


def refuse_equal(
    store: Store, directory: str, held: Iterable[Sequence[TensorRef]], what: str
) -> None:
    """Check that no two ranks hold the same.

    Torch's own checksums are compared; nothing is read unless they are equal. Files without them
    are not compared.

    Args:
        store: Where.
        directory: Of the files.
        held: By rank, what no two of them have in common.
        what: It is, for errors.

    Raises:
        CheckpointCorruptError: Two are equal, and more than a few numbers over and over.
    """
    seen: dict[_Prints, str] = {}
    for found in held:
        refs = [ref for ref in found if ref.num_elements]
        if not refs or any(ref.extent is None for ref in refs):
            continue
        first = seen.setdefault(tuple(map(_print, refs)), refs[0].file)
        if first == refs[0].file or all(_is_plain(store, directory, ref) for ref in refs):
            continue
        path = join(directory, refs[0].file)
        raise CheckpointCorruptError(
            f"{path} holds the same {what} as {first}, but ranks hold different parts: one of them "
            "was copied over the other; bring the right one back or use another checkpoint",
            path=path,
            file=refs[0].file,
            same_as=first,
        )


def _print(ref: TensorRef) -> tuple[object, ...]:
    extent = ref.extent
    assert extent is not None, f"{ref.file} has no checksums"
    start = ref.offset_bytes - extent.offset_bytes
    return ref.dtype, ref.shape, start, extent.num_bytes, extent.crc32


def _is_plain(store: Store, directory: str, ref: TensorRef) -> bool:
    """Return whether what is looked at of a flat tensor is a few numbers over and over."""
    itemsize = DTYPE_BYTES[ref.dtype]
    path, size = join(directory, ref.file), _SAMPLE_BYTES // itemsize
    lows = sorted({0, max(ref.num_elements - size, 0) // 2, max(ref.num_elements - size, 0)})
    found: set[bytes] = set()
    for low in lows:
        count = min(size, ref.num_elements - low)
        data = store.read_range(path, ref.offset_bytes + low * itemsize, count * itemsize)
        found |= {data[at : at + itemsize] for at in range(0, len(data), itemsize)}
    return len(found) <= _NUMBERS_MAX
