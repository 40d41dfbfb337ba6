"""Reads the fragments of a large document as columns, if it is printed as in SPEC.md, section 2.

A document is mostly its lists of fragments. This module cuts them out of the text and compares them
with their expected form, number by number, with numpy. It reads the small rest as JSON. It leaves
everything that looks different (spacing, unknown keys, replicas, damage) to
``ucp_core.manifest.validation``, and accepts nothing that validation would refuse. The module is
pure.

For 100,000 fragments, 10 MB, msgspec takes 1.8 times as long and 2.6 times as much memory, and does
not notice two members with one name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucp_core.geometry import (
    FILE,
    FIRST_BLOCK,
    NUM_BLOCKS,
    NUM_BYTES,
    OFFSET,
    START,
    STOP,
    Table,
    TableTensor,
    TableTensors,
    TensorKey,
    columns_of,
)
from ucp_core.manifest.validation import CRC_MAX, load_json, validate, validate_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucp_core.geometry import Numbers

_HEAD = re.compile(
    rb'\{"format":"everstep-(?:distributed|rank-record)","version":1,"step":\d+,"attempt":\d+,'
    rb'"block_bytes":\d+,"tensors":(?=\{)'
)
_LIST = b',"fragments":['
_BEHIND = b',"param_groups":['
#: Replaces a list that was cut out. JSON cannot contain it.
_MARK = b"NaN"
#: Lists are compared in chunks of this size, whose temporary arrays (10 times as large) stay in the
#: cache.
_CHUNK_BYTES = 1 << 18
#: Boxes are padded to the most dims of any tensor; with more, padding would outgrow the text.
_NDIM_MAX = 8
#: Number of digits that ``np.fromstring`` reads without overflow.
_DIGITS_MAX = 18
_KNOWN_MAX = 8
#: A list of 1,000 ranks has 0.2 MB.
_LIST_BYTES_MAX = 16 << 20
#: Count of numbers in a fragment besides its box and blocks: two in the file's name, offset, size,
#: the 32 in the key ``crc32``, and its value.
_NUM_FIXED = 6
#: Bound of the numbers in a file's name.
_NAME_NUMBER_MAX = 1 << 31
_SPACES = bytes(byte if byte in b"0123456789" else 0x20 for byte in range(256))
_ZERO, _OPEN = b"0{"


class Scanned(NamedTuple):
    """A valid document."""

    document: dict[str, Any]  #: The document with all lists of fragments empty.
    table: Table  #: The fragments.


def scan(data: bytes) -> Scanned | None:
    """Return a document's content, or None if it must be read value by value."""
    head = _HEAD.match(data)
    behind = data.find(_BEHIND, head.end()) if head else -1
    if head is None or behind < 0:
        return None
    text = data[head.end() : behind]
    try:
        document = load_json(data[: head.end()] + b"{}" + data[behind:])
        read = None if validate(document) else _read_known(text) or _read(text)
    except (ValueError, RecursionError):
        return None
    if read is None:
        return None
    tensors, firsts, rows = read
    names = _numbered_files(rows.places, document["files"])
    if names is None:
        return None
    table = Table(tensors.listed, firsts, rows.bounds, rows.places, names, rows.blocks)
    if not _is_sound(table, document["files"], document["block_bytes"]):
        return None
    return Scanned(document | {"tensors": tensors.document}, table)


class _Read(NamedTuple):
    """The text of tensors."""

    tensors: _Tensors  #: Everything but the fragments.
    firsts: Numbers  #: As in ``Table``.
    rows: _FragmentRows  #: The fragments.


class _Known(NamedTuple):
    """A text of tensors that was read before."""

    tensors: _Tensors  #: Everything but the fragments.
    firsts: Numbers  #: As in ``Table``.
    shape: _Shape  #: Places of the numbers of fragments among all numbers of the text.
    others: Numbers  #: Places of the numbers in names and shapes.
    values: Numbers  #: Values of the others.
    num_digits: Numbers  #: Digits of the others.


#: Known texts by form. The records of a pipeline stage's ranks, and of their next versions, differ
#: only in numbers. A known form makes reading a record of 0.2 MB 8 times as fast.
_known: dict[bytes, _Known] = {}


def _read_known(text: bytes) -> _Read | None:
    """Read a text that differs from a known one only in the numbers of its fragments."""
    numbers = _numbers(text) if _known and len(text) <= _CHUNK_BYTES else None
    known = None if numbers is None else _known.get(numbers.form.tobytes())
    if numbers is None or known is None:
        return None
    if not np.array_equal(numbers.values[known.others], known.values):
        return None
    if not np.array_equal(numbers.num_digits[known.others], known.num_digits):
        return None
    rows = _rows(numbers, known.shape)
    return None if rows is None else _Read(known.tensors, known.firsts, rows)


def _learn(
    text: bytes, cut: _WithoutLists, tensors: _Tensors, firsts: Numbers, shape: _Shape
) -> None:
    """Remember a text if all its numbers were compared at once."""
    numbers = _numbers(text)
    if numbers is None:
        return
    steps = np.zeros(len(numbers.starts) + 1, np.int64)
    np.add.at(steps, np.searchsorted(numbers.starts, cut.begins), 1)
    np.add.at(steps, np.searchsorted(numbers.starts, cut.ends), -1)
    is_inside = np.cumsum(steps[:-1]) > 0
    others = np.flatnonzero(~is_inside)
    # Both are followed by the two numbers that stand for missing dims.
    place = np.append(np.flatnonzero(is_inside), (len(is_inside), len(is_inside) + 1))
    moved = shape._replace(
        bounds=place[shape.bounds],
        fixed=place[shape.fixed],
        plain=place[shape.plain],
        blocks=place[shape.blocks],
    )
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    values, num_digits = numbers.values[others], numbers.num_digits[others]
    _known[numbers.form.tobytes()] = _Known(tensors, firsts, moved, others, values, num_digits)


def _read(text: bytes) -> _Read | None:
    """Read the text of tensors."""
    cut = _without_lists(text)
    tensors = None if cut is None else _tensors(cut.text)
    if cut is None or tensors is None or len(cut.begins) != len(tensors.listed.ndims):
        return None
    ndim = tensors.listed.ndim
    if ndim > _NDIM_MAX:
        return None
    lists = list(zip(cut.begins, cut.ends, strict=True))
    counts = np.array([text.count(b"{", begin, end) for begin, end in lists], np.int64)
    firsts: Numbers = np.concatenate(([0], np.cumsum(counts)))
    ndims = np.repeat(tensors.listed.ndims, counts)
    found = [_no_rows(ndim)]
    num_blocks = 0
    for low, high in _chunks(lists):
        chunk = b",".join([text[begin:end] for begin, end in lists[low:high] if begin < end])
        if not chunk:
            continue
        numbers = _numbers(chunk) if len(chunk) <= _LIST_BYTES_MAX else None
        shape = numbers and _shape(numbers, ndims[firsts[low] : firsts[high]], ndim)
        rows = numbers and shape and _rows(numbers, shape)
        if not shape or not rows:
            return None
        if high - low == len(lists) and len(text) <= _CHUNK_BYTES:
            _learn(text, cut, tensors, firsts, shape)
        rows.places[:, FIRST_BLOCK] += num_blocks
        num_blocks += len(rows.blocks)
        found.append(rows)
    bounds, places, blocks = map(np.concatenate, zip(*found, strict=True))
    return _Read(tensors, firsts, _FragmentRows(bounds, places, blocks))


class _WithoutLists(NamedTuple):
    """The text of tensors without its lists of fragments."""

    text: bytes  #: The text with a mark in place of each list.
    begins: list[int]  #: Position at which the inside of each list began.
    ends: list[int]  #: Position at which the inside of each list ended.


def _without_lists(text: bytes) -> _WithoutLists | None:
    pieces: list[bytes] = []
    begins: list[int] = []
    ends: list[int] = []
    done = 0
    while (low := text.find(_LIST, done)) >= 0:
        low += len(_LIST)
        # Names of everstep's files have no brackets.
        high = low if text.startswith(b"]", low) else text.find(b"}]", low) + 1
        if not high:
            return None
        pieces.append(text[done : low - 1])
        begins.append(low)
        ends.append(high)
        done = high + 1
    rest = _MARK.join([*pieces, text[done:]])
    if rest.count(_MARK) != len(begins):
        return None
    return _WithoutLists(rest, begins, ends)


class _Tensors(NamedTuple):
    """Everything about tensors except their fragments. Shared, so do not change it."""

    document: dict[str, Any]
    listed: TableTensors


class _ListMark(int):
    """The number of a list that was cut out."""


def _tensors(text: bytes) -> _Tensors | None:
    """Return the content of the text of tensors without lists, or None if it is not valid."""
    marks: list[_ListMark] = []

    def mark(name: str) -> _ListMark:
        if name != _MARK.decode():
            raise ValueError(name)
        marks.append(_ListMark(len(marks)))
        return marks[-1]

    document = load_json(text, constant=mark)
    found: list[TableTensor] = []
    try:
        for fqn, tensor in document.items():
            for slot, value in tensor["slots"].items():
                place, value["fragments"] = value["fragments"], []
                if type(place) is not _ListMark or place != len(found):
                    return None
                shape = tuple(value.get("shape", tensor["shape"]))
                found.append(TableTensor(TensorKey(fqn, slot), value["dtype"], shape))
    except (AttributeError, KeyError, TypeError):
        return None
    if len(found) != len(marks) or validate_tensors(document):
        return None
    return _Tensors(document, TableTensors(found))


class _FragmentRows(NamedTuple):
    """Fragments in the order of the text; see ``Table``.

    Files are given by the numbers in their names.
    """

    bounds: Numbers
    places: Numbers
    blocks: NDArray[np.uint32]


class _Shape(NamedTuple):
    """Places of the numbers of fragments among all numbers, to which 0 and 1 are appended."""

    bounds: Numbers  #: Bounds of boxes, as in ``Table``.
    fixed: Numbers  #: The other numbers that every fragment has.
    plain: Numbers  #: All numbers but those in files' names.
    blocks: Numbers
    num_blocks: Numbers


def _no_rows(ndim: int) -> _FragmentRows:
    places = np.zeros((0, NUM_BLOCKS + 1), np.int64)
    return _FragmentRows(np.zeros((0, 2, ndim), np.int64), places, np.zeros(0, np.uint32))


def _chunks(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ``[low, high)`` of lists that are compared together."""
    low = num_bytes = 0
    for number, (begin, end) in enumerate(places):
        if num_bytes + end - begin > _CHUNK_BYTES and number > low:
            yield low, number
            low, num_bytes = number, 0
        num_bytes += end - begin
    yield low, len(places)


class _Numbers(NamedTuple):
    """The numbers of a text."""

    form: NDArray[np.uint8]  #: The text with 0 for every number.
    starts: Numbers  #: Position at which each number begins.
    values: Numbers
    num_digits: Numbers
    is_padded: NDArray[np.bool_]  #: Whether a number has leading zeros.


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
        starts,
        np.fromstring(text.translate(_SPACES), np.int64, sep=" "),
        num_digits,
        (letters[starts] == _ZERO) & (num_digits > 1),
    )


def _shape(numbers: _Numbers, ndims: Numbers, ndim_max: int) -> _Shape | None:
    """Return the places of the numbers of fragments, whose tensors have ``ndims`` dims."""
    form, num_numbers = numbers.form, len(numbers.values)
    # The first number of each fragment.
    begin = np.searchsorted(np.flatnonzero(form == _ZERO), np.flatnonzero(form == _OPEN))
    num_blocks = np.diff(begin, append=num_numbers) - 2 * ndims - _NUM_FIXED
    if num_blocks.min() < 0 or form.tobytes() != _expected(ndims, num_blocks):
        return None
    bounds = np.empty((len(begin), 2, ndim_max), np.int64)
    for dim in range(ndim_max):
        for side in (START, STOP):
            place = begin + 2 * dim + side
            bounds[:, side, dim] = np.where(ndims > dim, place, num_numbers + side)
    fixed = (begin + 2 * ndims)[:, None] + np.arange(_NUM_FIXED)
    is_block = np.ones(num_numbers + 2, np.bool_)
    is_block[bounds] = is_block[fixed] = is_block[num_numbers:] = False
    # A fragment of one block: the block has the fragment's checksum.
    is_block[fixed[num_blocks == 0, _NUM_FIXED - 1]] = True
    is_plain = np.ones(num_numbers, np.bool_)
    is_plain[fixed[:, :2]] = False
    return _Shape(
        bounds,
        fixed,
        np.flatnonzero(is_plain),
        np.flatnonzero(is_block),
        np.maximum(num_blocks, 1),
    )


def _rows(numbers: _Numbers, shape: _Shape) -> _FragmentRows | None:
    """Return the fragments, or None if a number is printed differently or too large."""
    values = np.append(numbers.values, (0, 1))
    attempt, rank, offset, num_bytes, is_32, crc32 = values[shape.fixed].T
    blocks = values[shape.blocks]
    is_name = _is_printed(shape.fixed[:, 0], 4, numbers) & _is_printed(
        shape.fixed[:, 1], 5, numbers
    )
    if (
        not is_name.all()
        or numbers.is_padded[shape.plain].any()
        or (is_32 != 32).any()  # noqa: PLR2004
        or max(crc32.max(), blocks.max()) > CRC_MAX
        or max(attempt.max(), rank.max()) >= _NAME_NUMBER_MAX
    ):
        return None
    file = attempt * _NAME_NUMBER_MAX + rank
    first_block = np.cumsum(shape.num_blocks) - shape.num_blocks
    places = np.stack([file, offset, num_bytes, crc32, first_block, shape.num_blocks], axis=1)
    return _FragmentRows(values[shape.bounds], places, blocks.astype(np.uint32))


def _is_printed(places: Numbers, width: int, numbers: _Numbers) -> NDArray[np.bool_]:
    """Return whether numbers are zero-padded to ``width`` digits and no more."""
    num_digits, is_padded = numbers.num_digits[places], numbers.is_padded[places]
    found: NDArray[np.bool_] = (num_digits == width) | (num_digits > width) & ~is_padded
    return found


def _expected(ndims: Numbers, num_blocks: Numbers) -> bytes:
    """Return the form of fragments with these numbers of dims and blocks."""
    kinds = list(zip(ndims.tolist(), num_blocks.tolist(), strict=True))
    forms = {kind: _form(*kind) for kind in set(kinds)}
    return b",".join([forms[kind] for kind in kinds])


def _form(ndim: int, num_blocks: int) -> bytes:
    box = b",".join([b"[0,0]"] * ndim)
    blocks = b',"blocks":[' + b",".join([b"0"] * num_blocks) + b"]" if num_blocks else b""
    place = b'"file":"a0-r0.bin","offset":0,"nbytes":0,"crc0":0'
    return b'{"box":[' + box + b"]," + place + blocks + b"}"


def _numbered_files(places: Numbers, files: Mapping[str, Any]) -> list[str] | None:
    """Number the files of fragments; return their names, or None if one is unknown."""
    found, places[:, FILE] = np.unique(places[:, FILE], return_inverse=True)
    numbers = (divmod(number, _NAME_NUMBER_MAX) for number in found.tolist())
    names = [f"a{attempt:04d}-r{rank:05d}.bin" for attempt, rank in numbers]
    return names if all(name in files for name in names) else None


def _is_sound(table: Table, files: Mapping[str, Mapping[str, int]], block_bytes: int) -> bool:
    """Return whether the numbers satisfy SPEC.md, sections 2 and 3."""
    tensor, bounds = table.tensor_of, table.bounds
    start, stop = bounds[:, START], bounds[:, STOP]
    offset, num_bytes = table.places[:, OFFSET], table.places[:, NUM_BYTES]
    sizes = np.array([files[name]["nbytes"] for name in table.files], np.int64)
    # A tensor has less than 2^60 elements, so no product of a valid box overflows.
    expected_bytes = (stop - start).prod(axis=1) * table.tensors.itemsizes[tensor]
    num_blocks = np.maximum(-(-num_bytes // block_bytes), 1)
    return bool(
        (start <= stop).all()
        and (stop <= table.tensors.whole[tensor, STOP]).all()
        and (num_bytes == expected_bytes).all()
        and (offset + num_bytes <= sizes[table.places[:, FILE]]).all()
        and (table.places[:, NUM_BLOCKS] == num_blocks).all()
        and _is_sorted(tensor, bounds)
    )


def _is_sorted(tensor: Numbers, bounds: Numbers) -> bool:
    """Return whether rows are sorted by tensor, then by box."""
    is_same = np.ones(max(len(tensor) - 1, 0), np.bool_)
    for column in (tensor, *columns_of(bounds)):
        steps = np.diff(column)
        if (is_same & (steps < 0)).any():
            return False
        is_same &= steps == 0
    return True
