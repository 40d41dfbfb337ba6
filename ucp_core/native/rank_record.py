"""What a rank's record says of its tensors, as a form: printed once, filled in at every save.

From one save of a rank to the next only checksums change. Printing a few hundred tensors anew
takes 3 ms, which a snapshot of every step cannot pay; filling in takes a twentieth of it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ucp_core.geometry import DTYPE_BYTES, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.manifest import Kind, Manifest, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucp_core.native.opening import LocalTensor

__all__ = ["TensorsForm"]

#: Stands for a checksum until there is one.
_HOLE = -1
_CRC_CHARS = len(str(2**32 - 1))
#: In a name these quotes would be escaped: it finds places of checksums and nothing else.
_HOLES = re.compile(r'"crc32":-1(?:,"blocks":\[-1(?:,-1)*\])?')


class TensorsForm:
    """The text of the ``tensors`` of a rank's record, but for their checksums.

    Args:
        tensors: What the rank writes, in the order in which it lies in the file; the boxes of one
            tensor in their order.
        file: Name of the data file.
        block_bytes: The blocks that have checksums of their own.

    Attributes:
        sizes_bytes: Of every tensor's data, in the same order.
        text_bytes_max: Of the text, filled in.
    """

    def __init__(self, tensors: Sequence[LocalTensor], file: str, *, block_bytes: int) -> None:
        sizes = [t.box.num_elements * DTYPE_BYTES[t.dtype] for t in tensors]
        self.sizes_bytes = sizes
        places: dict[TensorKey, list[tuple[Fragment, int]]] = {}
        entries: dict[TensorKey, TensorEntry] = {}
        offset_bytes = 0
        for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            key = TensorKey(tensor.fqn, tensor.slot)
            holes = (_HOLE,) * -(-size // block_bytes)
            fragment = Fragment(tensor.box, file, offset_bytes, size, _HOLE, holes)
            found = places.setdefault(key, [])
            found.append((fragment, index))
            entries[key] = TensorEntry(
                key=key,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                fragments=tuple(fragment for fragment, _ in found),
            )
            offset_bytes += size
        # As the document has them: by name and slot, then by box.
        self._order = [index for _, found in sorted(places.items()) for _, index in found]
        state_map = StateMap(entries=entries, block_bytes=block_bytes)
        blank = Manifest(
            kind=Kind.RANK_RECORD, step=0, attempt=0, state_map=state_map, files={}, rank=0
        )
        text = json.dumps(to_json(blank)["tensors"], separators=(",", ":"))
        self._text, num_places = _HOLES.subn(
            lambda place: place[0].replace(str(_HOLE), "%d"), text.replace("%", "%%")
        )
        assert num_places == len(tensors), "a name looks like the place of a checksum"
        num_blocks = sum(-(-size // block_bytes) for size in sizes)
        self.text_bytes_max = len(self._text) + (num_blocks + len(sizes)) * _CRC_CHARS

    def filled(self, totals: Sequence[int], blocks: Sequence[Sequence[int]]) -> str:
        """Return the text with checksums in place.

        Args:
            totals: crc32 of every tensor's data, in the order of the file.
            blocks: Of every block of it.
        """
        values: list[int] = []
        for index in self._order:
            values.append(totals[index])
            if len(blocks[index]) > 1:
                values += blocks[index]
        return self._text % tuple(values)
