"""Extract a tensor or a box of it to a file that other tools open."""

import io
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain
from typing import Any

import numpy as np

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, Box, TensorEntry, TensorKey
from ucp_core.native import Checkpoint, check_memory, stream_box
from ucp_core.numerics import FLOATS, crc32, decode, numpy_dtype
from ucp_core.storage import Buffer, Store

_FIRST = 8


def find(checkpoint: Checkpoint, fqn: str, slot: str) -> TensorEntry:
    """Return a tensor by its own name or a tied one; the ``UcpError`` names close matches."""
    entries = checkpoint.state_map.entries
    for name in (fqn, checkpoint.manifest.ties.get(fqn, fqn)):
        if TensorKey(name, slot) in entries:
            return entries[TensorKey(name, slot)]
    slots = sorted(key.slot for key in entries if key.fqn == fqn)
    if slots:
        raise UcpError(f"{fqn} has no slot {slot!r}: it has {', '.join(slots)}", fqn=fqn)
    near = get_close_matches(fqn, sorted({key.fqn for key in entries}), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UcpError(f"{checkpoint.directory} has no tensor {fqn!r}{hint}", fqn=fqn)


def parse_box(text: str, shape: tuple[int, ...]) -> Box:
    """Parse a box such as ``0:4,:,3``; missing dims are whole.

    Raises:
        UcpError: It is not a box, or lies outside the tensor.
    """
    start, stop = [0] * len(shape), list(shape)
    parts = text.split(",") if text.strip() else []
    if len(parts) > len(shape):
        raise UcpError(
            f"box {text!r} has {len(parts)} dims, but the tensor has shape {list(shape)}"
        )
    for dim, part in enumerate(parts):
        low, colon, high = (piece.strip() for piece in part.partition(":"))
        try:
            start[dim] = int(low) if low or not colon else 0
            stop[dim] = (int(high) if high else shape[dim]) if colon else start[dim] + 1
        except ValueError as error:
            raise UcpError(f"box {text!r} is not like 0:4,:,3") from error
        if not 0 <= start[dim] <= stop[dim] <= shape[dim]:
            raise UcpError(f"box {text!r} lies outside the tensor of shape {list(shape)}")
    return Box(tuple(start), tuple(stop))


def extract(
    checkpoint: Checkpoint,
    entry: TensorEntry,
    box: Box,
    *,
    memory_bytes: int,
    out: tuple[Store, str] | None = None,
) -> tuple[list[Any], int]:
    """Return the first elements of ``box`` and the crc32 of its bytes; write it to a file if given.

    A dtype known only by its bits has no first elements.

    Args:
        memory_bytes: Limit for the buffers.
        out: Store and path of a file that ends in ``.safetensors`` or ``.npy``.

    Raises:
        UcpError: The file has another ending, or its format cannot hold the dtype.
        CheckpointCorruptError: The source is damaged; no file is left.
    """
    check_memory(memory_bytes)
    first: list[Any] = []
    value = 0

    def slabs() -> Iterator[Buffer]:
        nonlocal value
        for slab in stream_box(checkpoint, entry, box, memory_bytes=memory_bytes):
            if not value and not first:
                first.extend(_numbers(slab.data, entry.dtype))
            value = crc32(slab.data, value)
            yield slab.data

    if out is None:
        for _ in slabs():
            pass
    else:
        store, path = out
        store.write_file(path, chain([_header(path, entry, box)], slabs()), fsync=False)
    return first, value


def _header(path: str, entry: TensorEntry, box: Box) -> bytes:
    if path.endswith(".safetensors"):
        from ucp_core.formats import print_header

        return print_header([(entry.key.fqn, entry.dtype, box.shape)], {"format": "pt"})
    if not path.endswith(".npy"):
        raise UcpError(f"{path} ends neither in .safetensors nor in .npy", path=path)
    dtype = numpy_dtype(entry.dtype)
    if dtype is None:
        raise UcpError(f"numpy has no {entry.dtype}: write {entry.key} to a .safetensors file")
    buffer = io.BytesIO()
    document = {"descr": dtype.str, "fortran_order": False, "shape": box.shape}
    np.lib.format.write_array_header_1_0(buffer, document)
    return buffer.getvalue()


def _numbers(data: memoryview, dtype: str) -> list[Any]:
    data = data[: _FIRST * DTYPE_BYTES[dtype]]
    values: list[Any] = []
    known = numpy_dtype(dtype)
    if dtype in FLOATS or dtype in {"F8_E4M3", "F8_E5M2"}:
        values = decode(dtype, data).tolist()
    elif known is not None:
        values = np.frombuffer(data, known).tolist()
    return values
