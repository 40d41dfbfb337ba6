"""Define the layout of a record ring's file.

The file has a header, the state of each process group, the members of the groups, and the records.
All numbers are little-endian. ``ring`` writes it, ``ring_reader`` reads it.
"""

import os
import struct
from pathlib import Path
from typing import Final

MAGIC: Final = b"everring"
VERSION: Final = 3

#: Maximum number of groups of a ring; further groups are counted but not recorded. A rank of a
#: 5-axis mesh is in about 10 groups, and pipeline pairs add 2 per neighbour.
NUM_GROUPS_MAX: Final = 128
#: Minimum number of records of a ring: a few steps in 256 KiB.
NUM_RECORDS: Final = 4096
#: Maximum number of records of a ring: 8 MiB.
NUM_RECORDS_MAX: Final = 131072
#: Suffix for the ring of the previous attempt.
LAST_SUFFIX: Final = ".last"

#: Bits of ``Record.flags``; none while the collective is in flight.
FINISHED: Final = 1
FAILED: Final = 2
ABORTED: Final = 4
FLAG_BITS: Final = 3

#: A rank's own work, recorded like collectives, but in no group.
SPANS: Final = ("data", "forward", "backward", "optimizer")
#: The recorded operations; a record holds the index.
OPS: Final = (
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    *SPANS,
)
#: The type of a tensor; a record holds the index. All other types are "".
DTYPES: Final = (
    "",
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "int32",
    "uint8",
    "int8",
    "bool",
)
OP_CODES: Final = {op: code for code, op in enumerate(OPS)}
#: The group index of a span.
NO_GROUP: Final = 0xFFFF

# magic, version, attempt, pid, number of ints for ranks, number of records
HEADER: Final = struct.Struct("<8sQQQQQ")
HEADER_BYTES: Final = 256
# Words of the header that change after creation, as indices of 8-byte words.
NUM_GROUPS_WORD: Final = 8
LEFT_WORD: Final = 9
NUM_DROPPED_WORD: Final = 10
#: Rank in the attempt + 1.
RANK_WORD: Final = 11
#: Records stored so far.
NUM_STORED_WORD: Final = 12
#: Number of the newest span's record + 1.
SPAN_WORD: Final = 13
#: 1 if the rank computes on a device.
DEVICE_WORD: Final = 14
# whether the place is known, (dp, pp, tp), and the node
PLACE: Final = struct.Struct("<IIII64s")
PLACE_AT: Final = 128
NODE_BYTES_MAX: Final = 64

# store, entered, finished, number and enter_ns of the one waited for or 0, size_bytes and call of
# the last one entered (with how many a device has not reached), bytes sent so far, store
STATE: Final = struct.Struct("<QQQQQQQQQ")
# length of the name, the name in UTF-8, index of the first rank, number of ranks
NAME: Final = struct.Struct("<Q112sII")
GROUP_BYTES: Final = 2 * STATE.size + NAME.size
NAME_BYTES_MAX: Final = 112
# number + 1, group, op, dtype, seq (of a span: tokens that it read), step, micro-batch, history (of
# a span on a device: what that took, in us, 0 if unknown), blocked in us, size_bytes (of a span:
# number + 1 of the span before), enter_ns, number + 1, exit_ns with flags
RECORD: Final = struct.Struct("<QHBBIIIIIQQQQ")
#: As indices of 4-byte and of 8-byte words.
SEQ_HALF: Final = 3
HISTORY_HALF: Final = 6
BLOCKED_HALF: Final = 7
EXIT_WORD: Final = 7

_KNUTH: Final = 0x9E3779B97F4A7C15
_KNUTH_INVERSE: Final = pow(_KNUTH, -1, 1 << 32)
_SEND: Final = OP_CODES["send"]
#: In these calls, the payloads of one number are equal on all members; in others they may differ.
_SAME_SIZE: Final = frozenset(
    OP_CODES[op] for op in ("all_reduce", "broadcast", "reduce", "send", "recv")
)


def sent_bytes(op: str, size_bytes: int, num_members: int) -> int:
    """Return the bytes that a rank sends to one other rank in a ring algorithm.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69, 2009. A root that sends or receives everything counts as a member of a
    ring.
    """
    if op == "recv":
        return 0
    if op == "all_gather":
        return size_bytes * (num_members - 1)
    if op in {"all_reduce", "reduce_scatter", "all_to_all"}:
        return (1 + (op == "all_reduce")) * size_bytes * (num_members - 1) // num_members
    return size_bytes


def history_after(history: int, op: int, dtype: int, size_bytes: int) -> int:
    """Return the 32-bit hash of a group's calls with one more, equal on all members.

    Multiplicative hashing (Knuth, The Art of Computer Programming, 6.4). The two ends of a transfer
    count as one operation.
    """
    known = size_bytes if op in _SAME_SIZE else 0
    word = min(op, _SEND) | dtype << 4 | known << 12
    return ((history << 32 ^ word) * _KNUTH >> 32) & 0xFFFFFFFF


def history_before(history: int, op: int, dtype: int, size_bytes: int) -> int:
    """Return the hash from which ``history_after`` makes ``history``."""
    known = size_bytes if op in _SAME_SIZE else 0
    high, low = divmod(min(op, _SEND) | dtype << 4 | known << 12, 1 << 32)
    return ((history - (low * _KNUTH >> 32)) * _KNUTH_INVERSE ^ high) & 0xFFFFFFFF


def packed_call(op: int, dtype: int, history: int) -> int:
    """Return a call in the form in which the state of a group holds it."""
    return op | dtype << 8 | history << 32


def call_with_ahead(call: int, num_ahead: int) -> int:
    """Return ``call`` with the number of later calls that a device has not reached."""
    return call | min(num_ahead, 0xFFFF) << 16


def unpacked_call(call: int) -> tuple[int, int, int, int]:
    """Return operation, dtype, history, and the number of later calls ahead of a device."""
    return call & 0xFF, call >> 8 & 0xFF, call >> 32, call >> 16 & 0xFFFF


def ints_offset(index: int) -> int:
    """Return the offset of a member of a group."""
    return HEADER_BYTES + NUM_GROUPS_MAX * GROUP_BYTES + 4 * index


def records_offset(num_ints: int) -> int:
    """Return the offset at which the records begin."""
    end = ints_offset(num_ints)
    return end + -end % 64


def last_ring_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the previous attempt's ring, given the current one at ``path``."""
    return Path(os.fspath(path) + LAST_SUFFIX)
