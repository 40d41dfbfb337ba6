"""Compute the parities that a node keeps of its group's parts, while ranks train."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from workers.memory import Part
from workers.parity.code import WINDOW_BYTES, add
from workers.parity.record import ParityRecord

#: Bytes of one part to read before the next part's turn; whole windows. A node that gets no request
#: for 2 s assumes that this one is gone. Turns of four windows cost a twelfth more than whole
#: blocks over loopback; in a group of 8 with two parities a round takes 1.5 s at 120 MB/s.
_TURN_BYTES: Final = 4 * WINDOW_BYTES


def write(record: ParityRecord, parts: Mapping[int, Part], body: memoryview) -> tuple[int, int]:
    """Compute the parities of ``record.place`` into ``body``, and write the record after them.

    Read from each part only the blocks that the parities cover, in turns: a node that gets no
    request for long assumes that this one is gone, and its rank overwrites the part.

    ``parts`` are the members of the record by place, without the node's own. ``body`` has
    ``buffer_bytes``. Return data bytes and record bytes, for finishing the buffer. Raise
    ``StorageError`` if a part is gone.
    """
    stripes = record.stripes
    size, target = stripes.block_bytes, np.frombuffer(body, dtype=np.uint8)
    scratch = bytearray(min(size, WINDOW_BYTES))
    blocks = [target[which * size : (which + 1) * size] for which in range(record.tolerance)]
    for block in blocks:
        block[:] = 0
    data_blocks = [
        (which, data_block, place)
        for which, stripe in enumerate(stripes.parities_of(record.place))
        for data_block, place in record.data_blocks(stripe)
    ]
    for turn in range(0, size, _TURN_BYTES):
        for which, data_block, place in data_blocks:
            stop = min(data_block.start + turn + _TURN_BYTES, data_block.stop)
            for low in range(data_block.start + turn, stop, WINDOW_BYTES):
                window = memoryview(scratch)[: min(WINDOW_BYTES, stop - low)]
                parts[place].fill(low, [window])
                add({which: blocks[which]}, data_block.index, window, low - data_block.start)
    data_bytes = record.tolerance * size
    packed = record.to_bytes()
    body[data_bytes : data_bytes + len(packed)] = packed
    return data_bytes, len(packed)
