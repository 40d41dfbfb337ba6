"""Records as dumps of torch's flight recorder, which ``torch.distributed.flight_recorder`` reads.

torch drops records before the latest first record of any rank, by a number that counts all calls of
a rank. Our ranks make different numbers of calls, so this module cuts the beginning: each
communicator keeps the calls that the records of all ranks cover.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from orchestrator.diagnosis.records import Operation, Records

#: Version in torch 2.13. Entries have had the same keys since torch 2.6.
_VERSION: Final = "2.10"
_TRANSFERS: Final = frozenset({"send", "recv"})
#: torch's names of the operations that it can match.
_NAMES: Final = {
    **{op: op for op in ("all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter")},
    **{op: op for op in ("barrier", *_TRANSFERS)},
    "all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base",
}  # fmt: skip
_PAIR: Final = 2
_DTYPES: Final = {
    "float64": ("Double", 8), "int64": ("Long", 8), "float32": ("Float", 4), "int32": ("Int", 4),
    "bfloat16": ("BFloat16", 2), "float16": ("Half", 2), "int16": ("Short", 2),
    "int8": ("Char", 1), "uint8": ("Byte", 1), "bool": ("Bool", 1),
}  # fmt: skip


def flight_recorder_dumps(records: Records) -> dict[int, dict[str, Any]]:
    """Return the dump of each rank that has records.

    A channel of transfers is a group of two. Spans are skipped, because torch records only calls.
    Receives from any rank and operations that torch does not know are skipped, too.
    """
    calls = [one for one in records.operations if one.comm and _is_known(one)]
    names = {comm: str(number) for number, comm in enumerate(sorted({one.comm for one in calls}))}
    first = _first(calls)
    dumps: dict[int, dict[str, Any]] = {}
    for one in sorted(calls, key=lambda each: (each.enter_s, each.seq)):
        dump = dumps.setdefault(
            one.rank,
            {"version": _VERSION, "pg_config": {}, "nccl_version": "", "pg_status": {},
             "entries": []},
        )  # fmt: skip
        name = names[one.comm]
        dump["pg_config"][name] = {
            "name": name, "desc": one.comm, "ranks": str(sorted(one.members)),
        }  # fmt: skip
        status = dump["pg_status"].setdefault(
            name,
            {"last_enqueued_collective": -1, "last_started_collective": -1,
             "last_completed_collective": -1},
        )  # fmt: skip
        reached = ["last_enqueued_collective", "last_started_collective"]
        reached += ["last_completed_collective"] if one.exit_s is not None and one.op else []
        for key in reached:
            status[key] = max(status[key], one.seq)
        if one.op and math.isfinite(one.enter_s) and one.seq >= first[one.comm]:
            dump["entries"].append(_entry(one, name, len(dump["entries"])))
    return dumps


def _is_known(one: Operation) -> bool:
    return not one.op or (
        one.op in _NAMES and (one.op not in _TRANSFERS or len(one.members) == _PAIR)
    )


def _first(calls: Iterable[Operation]) -> dict[str, int]:
    """Return, by communicator, the first call from which the records of all ranks are complete."""
    begins: dict[tuple[str, int], int] = {}
    for one in calls:
        if one.op:
            key = one.comm, one.rank
            begins[key] = min(one.seq, begins.get(key, one.seq))
    first: dict[str, int] = defaultdict(int)
    for (comm, _), seq in begins.items():
        first[comm] = max(first[comm], seq)
    return first


def _entry(one: Operation, name: str, number: int) -> dict[str, Any]:
    is_transfer = one.op in _TRANSFERS
    kind, width = _DTYPES.get(one.dtype, (one.dtype or "Byte", 1))
    size, num = one.size_bytes // width, len(one.members)
    sizes = {"all_gather": (size, size * num), "reduce_scatter": (size // num * num, size // num)}
    given, made = sizes.get(one.op, (size, size))
    called = _NAMES[one.op]
    if is_transfer:
        ranks = sorted(one.members)
        sender, receiver = (ranks.index(member) for member in one.members)
        ends = (sender, "->", receiver) if one.op == "send" else (receiver, "<-", sender)
        called = f"{one.op} {''.join(map(str, ends))}"
    entered_ns = int(one.enter_s * 1e9)
    return {
        "record_id": number,
        "pg_id": int(name),
        "process_group": (name, one.comm),
        "thread_name": "",
        "thread_id": "",
        "collective_seq_id": one.seq,
        "p2p_seq_id": one.seq if is_transfer else 0,
        "op_id": number,
        "profiling_name": f"gloo:{called}",
        "time_created_ns": entered_ns,
        "input_sizes": [[given]],
        "input_dtypes": [kind],
        "output_sizes": [[made]],
        "output_dtypes": [kind],
        "state": "scheduled" if one.exit_s is None else "completed",
        "time_discovered_started_ns": entered_ns,
        "time_discovered_completed_ns": None if one.exit_s is None else int(one.exit_s * 1e9),
        "retired": one.exit_s is not None,
        "timeout_ms": 0,
        "is_p2p": is_transfer,
        "frames": [],
    }
