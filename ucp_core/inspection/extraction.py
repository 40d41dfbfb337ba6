"""One tensor, or a box of it: what is in it, and a file of it that other tools open."""

from __future__ import annotations

import io
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from ucp_core.errors import UcpError
from ucp_core.geometry import DTYPE_BYTES, Box, TensorEntry, TensorKey
from ucp_core.native import check_memory, stream_box
from ucp_core.numerics import FLOATS, crc32, decode, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from ucp_core.native import Checkpoint
    from ucp_core.storage import Buffer, Store

_FIRST = 8
#: Elements that are looked at as numbers at a time.
_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is in a box of a tensor.

    Attributes:
        fqn: Name of the tensor.
        slot: Its slot.
        dtype: By safetensors' names.
        shape: Of the whole tensor.
        box: The box that was read.
        num_elements: Of the box.
        crc32: Of its bytes, C-contiguous.
        first: The first elements; empty for dtypes whose bits are all that is known.
        low: The smallest number; None if there is none, as with the next four.
        high: The largest one.
        mean: Of the finite ones.
        std: Of the finite ones.
        num_zero: Elements that are zero.
        num_nan: Elements that are not a number.
        num_infinite: Elements that are infinite.
    """

    fqn: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    num_elements: int
    crc32: int
    first: tuple[Any, ...]
    low: float | int | None
    high: float | int | None
    mean: float | None
    std: float | None
    num_zero: int
    num_nan: int
    num_infinite: int


def find(checkpoint: Checkpoint, fqn: str, slot: str) -> TensorEntry:
    """Return a tensor by its name, or by one that is tied to it.

    Raises:
        UcpError: There is none; names those that come close.
    """
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
    """Return the box that ``0:4,:,3`` means; dims that are left out are whole.

    Raises:
        UcpError: It is none, or lies outside the tensor.
    """
    start, stop = [0] * len(shape), list(shape)
    parts = text.split(",") if text.strip() else []
    if len(parts) > len(shape):
        raise UcpError(f"box {text!r} has {len(parts)} dims, the tensor has shape {list(shape)}")
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
) -> Summary:
    """Return what is in ``box``, and write it to a file if one is given.

    Args:
        checkpoint: The source, of whatever format.
        entry: A tensor of it.
        box: What of it.
        memory_bytes: Bound of the buffers.
        out: Store and path that ends in ``.safetensors`` or ``.npy``.

    Raises:
        UcpError: The file's format cannot hold the dtype, or is none of the two.
        CheckpointCorruptError: The source is damaged; no file is left.
        StorageError: A storage refused.
    """
    check_memory(memory_bytes)
    summing = _Summing(entry, box)

    def slabs() -> Iterator[Buffer]:
        for slab in stream_box(checkpoint, entry, box, memory_bytes=memory_bytes):
            summing.add(slab.data)
            yield slab.data

    if out is None:
        for _ in slabs():
            pass
    else:
        store, path = out
        header = _header(path, entry, box)

        def chunks() -> Iterator[Buffer]:
            yield header
            yield from slabs()

        store.write_file(path, chunks(), fsync=False)
    return summing.summary()


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


class _Summing:
    """Takes the bytes of a box slab by slab."""

    def __init__(self, entry: TensorEntry, box: Box) -> None:
        self._entry = entry
        self._box = box
        self._crc32 = 0
        self._first: list[Any] = []
        self._low: Any = None
        self._high: Any = None
        self._count = self._zeros = self._nans = self._infinite = 0
        # Mean and sum of squared deviations, joined piece by piece (Chan, Golub, LeVeque 1979).
        self._mean = self._squares = 0.0

    def add(self, data: memoryview) -> None:
        """Take the next bytes."""
        self._crc32 = crc32(data, self._crc32)
        step = _CHUNK_ELEMENTS * DTYPE_BYTES[self._entry.dtype]
        for low in range(0, len(data), step):
            values = _numbers(data[low : low + step], self._entry.dtype)
            if values is not None:
                self._add(values)

    def _add(self, values: npt.NDArray[Any]) -> None:
        if len(self._first) < _FIRST:
            self._first += values[: _FIRST - len(self._first)].tolist()
        self._zeros += int((values == 0).sum())
        if values.dtype.kind == "c":
            return
        if values.dtype.kind == "f":
            nan = np.isnan(values)
            self._nans += int(nan.sum())
            values = values[~nan]
        if len(values) == 0:
            return
        ends = values.min().item(), values.max().item()
        self._low = ends[0] if self._low is None else min(self._low, ends[0])
        self._high = ends[1] if self._high is None else max(self._high, ends[1])
        finite = values[np.isfinite(values)].astype(np.float64)
        self._infinite += len(values) - len(finite)
        if len(finite):
            self._moments(finite)

    def _moments(self, values: npt.NDArray[np.float64]) -> None:
        count = self._count + len(values)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            gap = mean - self._mean
            self._squares += float(((values - mean) ** 2).sum())
            self._squares += gap * gap * self._count * len(values) / count
        self._mean += gap * len(values) / count
        self._count = count

    def summary(self) -> Summary:
        """Return what was found."""
        std = None
        if self._count:
            std = (self._squares / self._count) ** 0.5
        return Summary(
            fqn=self._entry.key.fqn,
            slot=self._entry.key.slot,
            dtype=self._entry.dtype,
            shape=self._entry.shape,
            box=self._box,
            num_elements=self._box.num_elements,
            crc32=self._crc32,
            first=tuple(self._first),
            low=self._low,
            high=self._high,
            mean=self._mean if self._count else None,
            std=std,
            num_zero=self._zeros,
            num_nan=self._nans,
            num_infinite=self._infinite,
        )


def _numbers(data: memoryview, dtype: str) -> npt.NDArray[Any] | None:
    if dtype in FLOATS or dtype in {"F8_E4M3", "F8_E5M2"}:
        return decode(dtype, data)
    known = numpy_dtype(dtype)
    return None if known is None else np.frombuffer(data, known)
