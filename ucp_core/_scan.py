"""Reads the fragments of a large document as columns, if it is printed as our writers print. Pure.

Nearly all of a document are its lists of fragments. They are cut out of the text and compared with
what they must look like number by number, at the speed of copying; what is left is small, and is
read as any JSON. Nothing is taken for good here that ``ucp_core._validation`` would refuse, and
whatever looks different is left to it: other spacing, unknown keys, replicas, and all damage.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucp_core._json import load_json
from ucp_core._table import (
    FILE,
    FIRST_BLOCK,
    NUM_BLOCKS,
    NUM_BYTES,
    OFFSET,
    START,
    STOP,
    Slot,
    Table,
    columns_of,
)
from ucp_core._validation import CRC_MAX, validate, validate_tensors
from ucp_core.statemap import TensorKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucp_core._table import Numbers

_HEAD = re.compile(
    rb'\{"format":"everstep-(?:distributed|rank-record)","version":1,"step":\d+,"attempt":\d+,'
    rb'"block_bytes":\d+,"tensors":(?=\{)'
)
_LIST = b',"fragments":['
_BEHIND = b',"param_groups":['
#: Stands where a list was cut out; no JSON has it.
_MARK = b"NaN"
#: Lists are compared so many bytes at a time: what is made of them takes some ten times as much,
#: which stays in the cache.
_CHUNK_BYTES = 1 << 18
#: Boxes are filled up to the most dims of any tensor, so more would take more than their text.
_NDIM_MAX = 8
#: ``np.fromstring`` reads as many digits without overflow.
_DIGITS_MAX = 18
_TENSORS_BYTES_MAX = 4 << 20
#: Numbers of a fragment beside its box and blocks: two in the file's name, offset, size, the 32
#: of ``crc32``, and its value.
_NUM_FIXED = 6
#: The numbers in a file's name are below.
_NAME_NUMBER_MAX = 1 << 31
_SPACES = bytes(byte if byte in b"0123456789" else 0x20 for byte in range(256))
_ZERO, _OPEN = b"0{"


class Scanned(NamedTuple):
    """A sound document.

    Attributes:
        document: It, with all lists of fragments empty.
        table: The fragments.
    """

    document: dict[str, Any]
    table: Table


def scan(data: bytes) -> Scanned | None:
    """Return what a document says, or None if it has to be read and validated otherwise."""
    cut = _cut(data)
    if cut is None:
        return None
    envelope, text, lists = cut
    try:
        document = load_json(envelope)
        # As many as are kept are small.
        read = _tensors if len(text) <= _TENSORS_BYTES_MAX else _tensors.__wrapped__
        tensors = read(text)
    except (ValueError, RecursionError):
        return None
    if tensors is None or len(lists) != len(tensors.slots) or validate(document):
        return None
    table = _table(lists, tensors.slots, document["files"], document["block_bytes"])
    if table is None:
        return None
    return Scanned(document | {"tensors": tensors.document}, table)


def _cut(data: bytes) -> tuple[bytes, bytes, list[bytes]] | None:
    """Return the document without tensors, its tensors without lists, and the lists."""
    head = _HEAD.match(data)
    if head is None:
        return None
    pieces: list[bytes] = []
    lists: list[bytes] = []
    done = head.end()
    while (low := data.find(_LIST, done)) >= 0:
        low += len(_LIST)
        # No name of a file that we write has brackets.
        high = low if data.startswith(b"]", low) else data.find(b"}]", low) + 1
        if not high:
            return None
        pieces.append(data[done : low - 1])
        lists.append(data[low:high])
        done = high + 1
    behind = data.find(_BEHIND, done)
    if behind < 0:
        return None
    text = _MARK.join([*pieces, data[done:behind]])
    if text.count(_MARK) != len(lists):
        return None
    return data[: head.end()] + b"{}" + data[behind:], text, lists


class _Tensors(NamedTuple):
    """What is said of tensors beside their fragments; others must not change it."""

    document: dict[str, Any]
    slots: tuple[Slot, ...]


class _Mark(int):
    """The place of a list that was cut out, and its number."""


@lru_cache(maxsize=4)
def _tensors(text: bytes) -> _Tensors | None:
    """Return what the text of tensors says, or None if it is not sound.

    The ranks of a checkpoint say the same, and so do the next checkpoints, so it is kept.
    """
    marks: list[_Mark] = []

    def mark(name: str) -> _Mark:
        if name != _MARK.decode():
            raise ValueError(name)
        marks.append(_Mark(len(marks)))
        return marks[-1]

    document = load_json(text, constant=mark)
    found: list[Slot] = []
    try:
        for fqn, tensor in document.items():
            for slot, value in tensor["slots"].items():
                place, value["fragments"] = value["fragments"], []
                if type(place) is not _Mark or place != len(found):
                    return None
                shape = tuple(value.get("shape", tensor["shape"]))
                found.append(Slot(TensorKey(fqn, slot), value["dtype"], shape))
    except (AttributeError, KeyError, TypeError):
        return None
    if len(found) != len(marks) or validate_tensors(document):
        return None
    return _Tensors(document, tuple(found))


class _Rows(NamedTuple):
    """Fragments in the order of the text; see ``Table``. Files have the numbers of their names."""

    bounds: Numbers
    places: Numbers
    blocks: NDArray[np.uint32]


def _table(
    lists: Sequence[bytes],
    slots: tuple[Slot, ...],
    files: Mapping[str, Mapping[str, int]],
    block_bytes: int,
) -> Table | None:
    """Return the fragments that are in the lists of all slots, or None if they are not sound."""
    ndim = max((len(slot.shape) for slot in slots), default=0)
    if ndim > _NDIM_MAX:
        return None
    counts = np.array([text.count(b"{") for text in lists], np.int64)
    firsts: Numbers = np.concatenate(([0], np.cumsum(counts)))
    ndims = np.repeat(np.array([len(slot.shape) for slot in slots], np.int64), counts)
    found = [_no_rows(ndim)]
    for low, high in _chunks(lists):
        text = b",".join(filter(None, lists[low:high]))
        if text:
            rows = _rows(text, ndims[firsts[low] : firsts[high]], ndim)
            if rows is None:
                return None
            found.append(rows)
    num_blocks = 0
    for rows in found:
        rows.places[:, FIRST_BLOCK] += num_blocks
        num_blocks += len(rows.blocks)
    bounds, places, blocks = map(np.concatenate, zip(*found, strict=True))
    names = _numbered_files(places, files)
    if names is None:
        return None
    table = Table(slots, firsts, bounds, places, names, blocks)
    return table if _is_sound(table, files, block_bytes) else None


def _no_rows(ndim: int) -> _Rows:
    places = np.zeros((0, NUM_BLOCKS + 1), np.int64)
    return _Rows(np.zeros((0, 2, ndim), np.int64), places, np.zeros(0, np.uint32))


def _chunks(lists: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield runs of lists that are compared together."""
    low = num_bytes = 0
    for place, text in enumerate(lists):
        if num_bytes + len(text) > _CHUNK_BYTES and place > low:
            yield low, place
            low, num_bytes = place, 0
        num_bytes += len(text)
    yield low, len(lists)


class _Numbers(NamedTuple):
    """The numbers of a text.

    Attributes:
        form: The text with 0 for every number.
        values: Of the numbers.
        num_digits: Of each.
        is_padded: Whether zeros come before its first digit.
    """

    form: NDArray[np.uint8]
    values: Numbers
    num_digits: Numbers
    is_padded: NDArray[np.bool_]


def _numbers(text: bytes) -> _Numbers | None:
    """Return the numbers of a text that neither begins nor ends with one."""
    letters = np.frombuffer(text, np.uint8)
    is_digit = (letters - np.uint8(_ZERO)) < 10  # noqa: PLR2004  what is below 0 becomes large
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    starts, stops = edges[0::2], edges[1::2]
    if is_digit[0] or is_digit[-1] or not len(starts):
        return None
    num_digits = stops - starts
    if num_digits.max() > _DIGITS_MAX:
        return None
    is_shown = ~is_digit
    is_shown[starts] = True
    form = letters.copy()
    form[starts] = _ZERO
    return _Numbers(
        form[is_shown],
        np.fromstring(text.translate(_SPACES), np.int64, sep=" "),
        num_digits,
        (letters[starts] == _ZERO) & (num_digits > 1),
    )


def _rows(text: bytes, ndims: Numbers, ndim_max: int) -> _Rows | None:
    """Return fragments of tensors with ``ndims`` dims, one each."""
    numbers = _numbers(text)
    if numbers is None:
        return None
    form, values, _, is_padded = numbers
    # Where the numbers of each fragment begin: the first of its box, and that behind its box.
    begin = np.searchsorted(np.flatnonzero(form == _ZERO), np.flatnonzero(form == _OPEN))
    behind = begin + 2 * ndims
    num_blocks = np.diff(begin, append=len(values)) - 2 * ndims - _NUM_FIXED
    if num_blocks.min() < 0 or form.tobytes() != _expected(ndims, num_blocks):
        return None
    attempt, rank, offset, num_bytes, is_32, crc32 = (values[behind + i] for i in range(_NUM_FIXED))
    is_name = _is_printed(behind, 4, numbers) & _is_printed(behind + 1, 5, numbers)
    is_padded[behind] = is_padded[behind + 1] = False
    is_block = np.ones(len(values), np.bool_)
    bounds = np.zeros((len(begin), 2, ndim_max), np.int64)
    bounds[:, STOP] = 1
    for dim in range(ndim_max):
        has_dim = ndims > dim
        for side in (START, STOP):
            place = begin[has_dim] + 2 * dim + side
            bounds[has_dim, side, dim] = values[place]
            is_block[place] = False
    for i in range(_NUM_FIXED):
        is_block[behind + i] = False
    # The only block of a fragment has the fragment's checksum.
    is_block[behind[num_blocks == 0] + _NUM_FIXED - 1] = True
    blocks = values[is_block]
    if (
        not is_name.all()
        or is_padded.any()
        or (is_32 != 32).any()  # noqa: PLR2004
        or max(crc32.max(), blocks.max()) > CRC_MAX
        or max(attempt.max(), rank.max()) >= _NAME_NUMBER_MAX
    ):
        return None
    num_blocks = np.maximum(num_blocks, 1)
    first_block = np.cumsum(num_blocks) - num_blocks
    file = attempt * _NAME_NUMBER_MAX + rank
    places = np.stack([file, offset, num_bytes, crc32, first_block, num_blocks], axis=1)
    return _Rows(bounds, places, blocks.astype(np.uint32))


def _is_printed(places: Numbers, width: int, numbers: _Numbers) -> NDArray[np.bool_]:
    """Return whether numbers are printed with at least ``width`` digits, and no zero too many."""
    num_digits, is_padded = numbers.num_digits[places], numbers.is_padded[places]
    found: NDArray[np.bool_] = (num_digits == width) | (num_digits > width) & ~is_padded
    return found


def _expected(ndims: Numbers, num_blocks: Numbers) -> bytes:
    """Return the form of fragments with so many dims and blocks."""
    kinds = list(zip(ndims.tolist(), num_blocks.tolist(), strict=True))
    forms = {kind: _form(*kind) for kind in set(kinds)}
    return b",".join([forms[kind] for kind in kinds])


def _form(ndim: int, num_blocks: int) -> bytes:
    box = b",".join([b"[0,0]"] * ndim)
    blocks = b',"blocks":[' + b",".join([b"0"] * num_blocks) + b"]" if num_blocks else b""
    place = b'"file":"a0-r0.bin","offset":0,"nbytes":0,"crc0":0'
    return b'{"box":[' + box + b"]," + place + blocks + b"}"


def _numbered_files(places: Numbers, files: Mapping[str, Any]) -> list[str] | None:
    """Number the files of fragments; return their names, or None if one is not known."""
    found, places[:, FILE] = np.unique(places[:, FILE], return_inverse=True)
    numbers = (divmod(number, _NAME_NUMBER_MAX) for number in found.tolist())
    names = [f"a{attempt:04d}-r{rank:05d}.bin" for attempt, rank in numbers]
    return names if all(name in files for name in names) else None


def _is_sound(table: Table, files: Mapping[str, Mapping[str, int]], block_bytes: int) -> bool:
    """Return whether the numbers are what they must be; see SPEC.md, sections 2 and 3."""
    slot, bounds = table.slot_of, table.bounds
    start, stop = bounds[:, START], bounds[:, STOP]
    offset, num_bytes = table.places[:, OFFSET], table.places[:, NUM_BYTES]
    sizes = np.array([files[name]["nbytes"] for name in table.files], np.int64)
    # Of a box in its tensor, which has less than 2^60 elements, none overflows to another size.
    expected_bytes = (stop - start).prod(axis=1) * table.itemsizes[slot]
    num_blocks = np.maximum(-(-num_bytes // block_bytes), 1)
    return bool(
        (start <= stop).all()
        and (stop <= table.shapes[slot]).all()
        and (num_bytes == expected_bytes).all()
        and (offset + num_bytes <= sizes[table.places[:, FILE]]).all()
        and (table.places[:, NUM_BLOCKS] == num_blocks).all()
        and _is_sorted(slot, bounds)
    )


def _is_sorted(slot: Numbers, bounds: Numbers) -> bool:
    """Return whether rows are in the order of their slots, and of their boxes in each."""
    is_same = np.ones(max(len(slot) - 1, 0), np.bool_)
    for column in (slot, *columns_of(bounds)):
        steps = np.diff(column)
        if (is_same & (steps < 0)).any():
            return False
        is_same &= steps == 0
    return True
