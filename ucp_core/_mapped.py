"""Takes what a plan asks for out of files that this process has in its memory already.

Nothing is read to anywhere: a block is verified where it lies, which brings it into the cache, and
what is needed of it is copied from there to where it belongs. The bytes around a range cost their
checksum, and no copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucp_core.checksums import crc32
from ucp_core.plan import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucp_core.plan import Copy
    from ucp_core.storage.base import Store


class Mapped(NamedTuple):
    """The bytes of a file, which others may be about to write over.

    Attributes:
        data: All of them.
        confirm: To be called behind the last look at them, with the number of bytes that were
            looked at; raises StorageError if they are not the file's any more.
    """

    data: memoryview
    confirm: Callable[[int], None]


def mapped_file(store: Store, path: str) -> Mapped | None:
    """Return the bytes of a file, if the store is one that has ``mapped`` and has it in memory."""
    # Not by a protocol, which to look for takes 20 us in Python 3.11.
    find: Callable[[str], Mapped | None] | None = getattr(store, "mapped", None)
    return None if find is None else find(path)


class DamagedBlockError(Exception):
    """A block is not what was written: see ``ucp_core.transfer``, which tells its user."""

    def __init__(self, copy: Copy, index: int) -> None:
        super().__init__(copy, index)
        self.copy, self.index = copy, index


def take(
    copies: Sequence[Copy],
    mapped: Mapped,
    block_bytes: int,
    targets: Sequence[memoryview],
    gather: Callable[[Copy, memoryview, int], None],
) -> None:
    """Take copies out of one file.

    Args:
        copies: From that file.
        mapped: Its bytes.
        block_bytes: The blocks of its checksums.
        targets: The memory of every part.
        gather: Takes the elements of a copy that do not lie side by side out of verified bytes,
            which begin at a byte of the fragment.

    Raises:
        DamagedBlockError: Bytes are damaged.
        StorageError: They were written over meanwhile.
    """
    whole: NDArray[np.uint8] = np.frombuffer(mapped.data, dtype=np.uint8)
    num_bytes = 0
    for copy in copies:
        low, high = readable(copy, block_bytes)
        num_bytes += high - low
        offset_bytes = copy.fragment.offset_bytes
        data = whole[offset_bytes + low : offset_bytes + high]
        if copy.target_byte < 0:
            for start in range(0, len(data), block_bytes):
                _verify(copy, (low + start) // block_bytes, data[start : start + block_bytes])
            gather(copy, data.data, low)
        else:
            target = np.frombuffer(targets[copy.part], dtype=np.uint8)
            _take_blocks(copy, data, low, block_bytes, target)
    mapped.confirm(num_bytes)


def _take_blocks(
    copy: Copy,
    data: NDArray[np.uint8],
    data_low: int,
    block_bytes: int,
    target: NDArray[np.uint8],
) -> None:
    """Verify and copy block by block; ``data`` begins at byte ``data_low`` of the fragment."""
    shift = copy.target_byte - copy.start_byte
    for start in range(0, len(data), block_bytes):
        block = data[start : start + block_bytes]
        low = data_low + start
        _verify(copy, low // block_bytes, block)
        first, last = max(low, copy.start_byte), min(low + len(block), copy.stop_byte)
        # Other threads of the process go on meanwhile, as they would not beside a memoryview.
        np.copyto(target[first + shift : last + shift], block[first - low : last - low])


def _verify(copy: Copy, index: int, block: NDArray[np.uint8]) -> None:
    if copy.fragment.crc32 is not None and crc32(block) != copy.fragment.blocks[index]:
        raise DamagedBlockError(copy, index)
