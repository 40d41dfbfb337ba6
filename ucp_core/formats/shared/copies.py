"""Refuses a copy of one rank's file under the name of another rank.

Ranks hold different parts of the model. Equal state on two ranks means that one file is there
twice, unless the state is a few repeated numbers: zeros of padding, or weights that begin as ones.
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

#: Size of a sample; one is read at the start, in the middle and at the end of a tensor.
_SAMPLE_BYTES = 64 << 10
#: Two ranks may share this many different numbers, as initial weights and padding do. A sound
#: checkpoint must not be refused, even if a copy goes unnoticed.
_NUMBERS_MAX = 16

_Prints: TypeAlias = tuple[tuple[object, ...], ...]


def refuse_equal(
    store: Store, directory: str, held: Iterable[Sequence[TensorRef]], what: str
) -> None:
    """Check that no two ranks hold the same.

    This compares torch's own checksums, and reads elements only where these are equal. Files
    without checksums are not compared.

    Args:
        held: By rank, the tensors that no two ranks may share.
        what: Name for these tensors, for errors.

    Raises:
        CheckpointCorruptError: Two ranks hold the same, and more than a few repeated numbers.
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
    """Return whether samples of a flat tensor are a few repeated numbers."""
    itemsize = DTYPE_BYTES[ref.dtype]
    path, size = join(directory, ref.file), _SAMPLE_BYTES // itemsize
    lows = sorted({0, max(ref.num_elements - size, 0) // 2, max(ref.num_elements - size, 0)})
    found: set[bytes] = set()
    for low in lows:
        count = min(size, ref.num_elements - low)
        data = store.read_range(path, ref.offset_bytes + low * itemsize, count * itemsize)
        found |= {data[at : at + itemsize] for at in range(0, len(data), itemsize)}
    return len(found) <= _NUMBERS_MAX
