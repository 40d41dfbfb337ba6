"""Compute XOR parity of files of unequal length, and restore one or any two lost members.

Files count as padded with zeros to the length of the parity. P is the XOR of all files. Q is the
XOR of all files, the i-th multiplied by A**i. A is the companion matrix of x^4 + x + 1 over GF(2),
applied to the four packets of a block. x generates GF(16), so A**i and the sum of two different
powers are invertible: P and Q restore any two of up to 15 members.

Everything is uint8: numpy's XOR is as fast as on uint64, and faster if memory is not aligned.
Parity does not show which member is wrong, so verify results by checksums.

Source: bit-matrix codes (Bloemer et al., ICSI TR-95-048; Plank and Xu, NCA 2006).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from workers.errors import ParityError

#: The two parities, as keys of a mapping and indices of a sequence.
P: Final = 0
Q: Final = 1
#: A generator of GF(16) has 15 different powers.
GROUP_MAX: Final = 15
_PACKETS: Final = 4
#: Size of a block of Q; part of the format. The last block of a file also has four packets. A
#: packet of a source and one of each parity fit the second-level cache.
BLOCK_BYTES: Final = _PACKETS * (128 << 10)
#: Bytes of each part to read at once: whole blocks of either parity.
WINDOW_BYTES: Final = 8 * BLOCK_BYTES
#: The size of a parity is a multiple of this, so that the last block has four equal packets.
_GRAIN_BYTES: Final = 64

#: Anything that numpy reads without a copy: bytes, memoryview, mmap, array.
Buffer: TypeAlias = Any
#: P, or P and Q. A mapping can also hold Q alone.
Parities: TypeAlias = Sequence[Buffer] | Mapping[int, Buffer]
_Array: TypeAlias = npt.NDArray[np.uint8]


def parity_bytes(lengths: Sequence[int]) -> int:
    """Return the size of each parity: the longest of ``lengths``, rounded up to 64."""
    return -(-max(lengths, default=0) // _GRAIN_BYTES) * _GRAIN_BYTES


def add(parity: Parities, index: int, data: Buffer, offset_bytes: int = 0) -> None:
    """Add some bytes of member ``index`` to a parity that was zeros at first.

    Add each byte of a member once, in any order and any division. Adding the same bytes again
    removes them, so adding the XOR of old and new bytes updates a parity.

    ``parity`` has writable buffers of ``parity_bytes`` each: P, P and Q, or ``{Q: ...}`` alone.
    ``offset_bytes`` is the position of the bytes in the member. Raise ``ParityError`` if the bytes
    do not lie within the parity, or there is no such member.
    """
    targets, size = _parities(parity)
    source = _array(data)
    end = offset_bytes + len(source)
    _check_member(targets, size, index, end)
    if offset_bytes < 0:
        raise ParityError(f"member {index}: its bytes begin at {offset_bytes}", index=index)
    for start, stop in _blocks(offset_bytes, end, size):
        low, high = max(start, offset_bytes), min(stop, end)
        chunk = source[low - offset_bytes : high - offset_bytes]
        _fold(targets, start, stop, index, chunk, low)


def rebuild(
    present: Mapping[int, Buffer],
    parity: Parities,
    missing: Sequence[int],
    targets: Sequence[Buffer],
) -> None:
    """Restore lost members from all others and one parity for each.

    A lost parity is not restored but computed again. The arguments may be windows that begin and
    end at multiples of ``BLOCK_BYTES``, or at the end.

    Args:
        present: The other members, whole, by index. Empty members may be absent.
        parity: The remaining parities, as a mapping if P is lost.
        missing: Indices of the lost members, at most two.
        targets: Writable buffers for the lost members, in the same order.

    Raises:
        ParityError: More members than parities are lost, or lengths do not fit.
    """
    if len(missing) > len(parity) or len(set(missing)) < len(missing):
        raise ParityError(
            f"members {sorted(missing)} of a group are lost and {len(parity)} of its parities are "
            "left: take another source",
            missing=sorted(missing),
            num_parities=len(parity),
        )
    if not missing:
        return
    known, size = _parities(parity)
    sources = {index: _array(member) for index, member in present.items() if index not in missing}
    outputs = dict(zip(missing, map(_array, targets), strict=True))
    for index, member in (sources | outputs).items():
        _check_member(known, size, index, len(member))
    # P is cheaper, if one parity is enough.
    used = dict(sorted(known.items())[: len(missing)])
    scratch = {which: np.empty(min(size, BLOCK_BYTES), np.uint8) for which in (*used, -1)}
    for start, stop in _blocks(0, size, size):
        syndromes = {which: scratch[which][: stop - start] for which in used}
        for which, syndrome in syndromes.items():
            syndrome[:] = used[which][start:stop]
        for index, source in sources.items():
            _fold(syndromes, 0, stop - start, index, source[start:stop], 0)
        solved = _solve(syndromes, sorted(missing), scratch[-1][: stop - start])
        for index, block in solved.items():
            chunk = outputs[index][start:stop]
            chunk[:] = block[: len(chunk)]


def _solve(syndromes: dict[int, _Array], missing: list[int], spare: _Array) -> dict[int, _Array]:
    """Return the blocks of the lost members, in the memory of the arguments.

    A syndrome is a parity minus the known members, which is the parity of the lost ones.
    """
    if len(missing) == 1:
        (index,) = missing
        if P in syndromes:
            return {index: syndromes[P]}
        return {index: _product(syndromes[Q], -index, spare)}
    first, second = missing
    both, weighted = syndromes[P], syndromes[Q]
    # P = x + y and Q = A^i x + A^j y, so Q + A^i P = (A^i + A^j) y = A^k y.
    _times(weighted, first, both, 0)
    found = _product(weighted, -_LOG[_POWERS[first][0] ^ _POWERS[second][0]], spare)
    both ^= found
    return {first: both, second: found}


def _product(block: _Array, exponent: int, target: _Array) -> _Array:
    target[:] = 0
    _times(target, exponent % GROUP_MAX, block, 0)
    return target


def _fold(
    targets: Mapping[int, _Array], start: int, stop: int, index: int, chunk: _Array, low: int
) -> None:
    """Add the bytes ``chunk`` at ``low`` of member ``index`` to one block of the parities."""
    if not len(chunk):
        return
    if P in targets:
        target = targets[P][low : low + len(chunk)]
        target ^= chunk
    if Q in targets:
        _times(targets[Q][start:stop], index, chunk, low - start)


def _times(block: _Array, exponent: int, chunk: _Array, offset: int) -> None:
    """Add A**exponent times a block, which is zero outside of ``chunk``, to ``block``."""
    packet = len(block) // _PACKETS
    for column in range(offset // packet, _PACKETS):
        low, high = max(offset, column * packet), min(offset + len(chunk), (column + 1) * packet)
        if low >= high:
            return
        source = chunk[low - offset : high - offset]
        for row in _ROWS[exponent][column]:
            shift = (row - column) * packet
            target = block[low + shift : high + shift]
            target ^= source


def _blocks(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the blocks of a parity of ``size`` that overlap ``low`` to ``high``."""
    for start in range(low // BLOCK_BYTES * BLOCK_BYTES, high, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, size)


def _parities(parity: Parities) -> tuple[dict[int, _Array], int]:
    named = parity if isinstance(parity, Mapping) else dict(enumerate(parity))
    arrays = {which: _array(named[which]) for which in sorted(named)}
    sizes = {len(array) for array in arrays.values()}
    if not arrays or not arrays.keys() <= {P, Q} or len(sizes) > 1:
        raise ParityError(
            f"parities must be P, or P and Q of equal length, not {len(named)} of sizes {sizes}"
        )
    (size,) = sizes
    if size % _GRAIN_BYTES:
        raise ParityError(f"a parity of {size} bytes: take parity_bytes(lengths)", size_bytes=size)
    return arrays, size


def _check_member(targets: Mapping[int, _Array], size: int, index: int, length: int) -> None:
    if index < 0 or (Q in targets and index >= GROUP_MAX):
        raise ParityError(
            f"member {index}: double parity has members 0 to {GROUP_MAX - 1}; form smaller groups",
            index=index,
        )
    if length > size:
        raise ParityError(
            f"member {index} has {length} bytes, its parity {size}: size it by parity_bytes "
            "of all lengths",
            index=index,
            size_bytes=length,
        )


def _array(buffer: Buffer) -> _Array:
    if isinstance(buffer, np.ndarray):
        flat: _Array = buffer.reshape(-1).view(np.uint8)
        return flat
    return np.frombuffer(buffer, dtype=np.uint8) if len(buffer) else np.empty(0, np.uint8)


def _powers() -> tuple[tuple[int, ...], ...]:
    """Return the columns of A**0 to A**14, as bit sets of rows; column c is x**i times x**c."""
    elements = [1]
    while len(elements) < GROUP_MAX + _PACKETS:
        double = elements[-1] << 1
        elements.append(double ^ 0b10011 if double & 0b10000 else double)
    return tuple(tuple(elements[i : i + _PACKETS]) for i in range(GROUP_MAX))


_POWERS: Final = _powers()
#: The exponent of a field element: the first column of A**i is the element itself.
_LOG: Final = {columns[0]: exponent for exponent, columns in enumerate(_POWERS)}
#: The rows that are one, by power and column.
_ROWS: Final = tuple(
    tuple(tuple(row for row in range(_PACKETS) if column >> row & 1) for column in columns)
    for columns in _POWERS
)
