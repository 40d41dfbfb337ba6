"""Read records of a run from files and find what is wrong (``everstep diagnose``).

Besides the documents of a run's incidents, it recognises three kinds of files by their content: our
record rings, the dumps of torch's flight recorder, and JSON lines with an operation each. It
executes nothing in a dump and builds no class.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.core import Incident
from orchestrator.diagnosis import (
    OS_STATES,
    Doing,
    Guilty,
    Operation,
    Records,
    Verdict,
    diagnose,
    flight_recorder_dumps,
    matched,
    trace,
)
from orchestrator.errors import ConfigError
from orchestrator.fault_kinds import FaultKind
from ucp_core.errors import CheckpointCorruptError, ForeignClassError
from ucp_core.torch_files import pickle_tree, read_pickle
from workers.telemetry import DTYPES, FINISHED, Record, Ring, is_ring, read_ring

_INCIDENT: Final = "incident.json"
#: A file beside the records; it holds the keepers' last reports on the members.
_REPORTS: Final = "reports.json"
_PICKLE: Final = b"\x80"
_RANK: Final = re.compile(r"(\d+)(?:\.\w+)?$")
_TRANSFER: Final = re.compile(r"(?:\w+:)?(send|recv) (\d+)(->|<-)(\d+)$")
_NAMES: Final = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
_WIDTHS: Final = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2,
}  # fmt: skip
#: Kinds of verdicts that the run reaches without its records. If a death cuts the records short,
#: they would blame ranks that still computed.
_TOLD: Final = frozenset(
    {FaultKind.DEAD, FaultKind.NOT_FINITE, FaultKind.DIVERGED, FaultKind.CORRUPT}
)
_PLANNED: Final = frozenset(kind for kind in FaultKind if kind.is_planned)
_OF_LINKS: Final = frozenset(
    {FaultKind.LINK_DEAD, FaultKind.SLOW_LINK, FaultKind.SLOW_SENDER, FaultKind.SLOW_RECEIVER}
)
_LONG_AGO: Final = -math.inf


class _Truncated(NamedTuple):
    """A file that a kill cut short."""

    path: Path
    rank: int | None
    error: str


class _NoClasses(dict[str, Any]):
    """Refuses every class that a dump names."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        path = self["path"]
        raise ForeignClassError(
            f"{path}: a dump of torch's flight recorder holds plain values only, but this one "
            f"names {name}; nothing was executed",
            path=str(path),
            name=name,
        )


def diagnose_paths(
    paths: Sequence[str],
    now_s: float | None = None,
    *,
    trace_file: str | None = None,
    dumps_folder: str | None = None,
) -> tuple[Verdict, ...]:
    """Return what is wrong, from records in files and (recursively) in directories.

    Args:
        paths: Files that must be records, and directories, in which other files are ignored.
        now_s: When the records were taken, on their clock, if the run may have been alive then.
        trace_file: The file to write for Perfetto, with the records and verdicts.
        dumps_folder: The folder for a file ``rank_N`` per rank, for torch's analyzer of flight
            recorders.

    Raises:
        ConfigError: A path holds no records, or a file cannot be read or written.
    """
    incidents = {
        path: Incident.from_json(json.loads(path.read_bytes()), number=0)
        for path, _ in _files(paths)
        if path.name == _INCIDENT
    }
    told = tuple(one for incident in incidents.values() for one in _told(incident))
    records, cut = _read(paths, now_s)
    # Judge only records of the newest attempt: it failed last.
    failed = [path for path, incident in incidents.items() if incident.kind not in _PLANNED]
    seen = tuple(_seen(failed[-1], told)) if failed else ()
    is_found = bool(seen) or (bool(failed) and _verdict(incidents[failed[-1]]) in _TOLD)
    is_judged = not is_found and (records.operations or not told)
    verdicts = (*told, *seen, *(diagnose(records) if is_judged else ()), *_left_out(cut))
    if trace_file is not None:
        _write(Path(trace_file), json.dumps(trace(records, verdicts)).encode())
    if dumps_folder is not None:
        for rank, dump in flight_recorder_dumps(records).items():
            _write(Path(dumps_folder) / f"rank_{rank}", pickle_tree(dump, allow=frozenset())[0])
    return verdicts


def _told(incident: Incident) -> Iterator[Verdict]:
    """Yield what the run itself found and the records do not show."""
    yield from (one for one in incident.suspects if one.kind in _OF_LINKS)
    verdict = _verdict(incident)
    if verdict in _TOLD:
        ranks = [rank for rank, _, _ in incident.places]
        nodes = {node for _, _, node in incident.places}
        yield Verdict(
            kind=FaultKind(verdict),
            guilty=Guilty.of(ranks, (), nodes),
            confidence=1.0 if ranks and incident.verdict else 0.5,
            evidence=incident.evidence,
        )


def _seen(incident: Path, told: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the members that the kernel called stopped or dead when the incident was found."""
    path = incident.with_name(_REPORTS)
    if not path.exists():
        return
    known = {(one.kind, rank) for one in told for rank in one.guilty.ranks}
    found: dict[Doing, list[int]] = {}
    for row in json.loads(path.read_bytes())["workers"]:
        state = OS_STATES.get(row["os_state"])
        if state is not None and (state.kind, row["rank"]) not in known:
            found.setdefault(state, []).append(row["rank"])
    for state, ranks in found.items():
        named = ", ".join(f"rank {rank}" for rank in sorted(ranks))
        yield Verdict(
            kind=state.kind,
            guilty=Guilty.of(ranks),
            confidence=1.0,
            evidence=f"By the kernel's word, {named} {state.text} (os_state in {path}).",
        )


def _left_out(cut: Sequence[_Truncated]) -> Iterator[Verdict]:
    for path, _, error in cut:
        yield Verdict(
            kind=FaultKind.UNDECIDED,
            confidence=1.0,
            evidence=f"{path} is truncated and skipped; everything else was read: {error}",
        )


def _verdict(incident: Incident) -> str:
    # A node that counts as lost may merely be cut off, so its incident has no verdict.
    return incident.verdict or (FaultKind.DEAD if incident.kind == FaultKind.NODE_LOSS else "")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the verdicts for people."""
    if not verdicts:
        yield "Nothing is at fault."
    for one in verdicts:
        since = "" if one.since_s is None else f" Since {one.since_s:.3f} s."
        yield f"{one.kind}: {_who(one.guilty)}. Confidence {one.confidence:.2f}.{since}"
        yield f"  {one.evidence}"
        if one.alternatives:
            others = (f"{other.kind} ({_who(other.guilty)})" for other in one.alternatives)
            yield f"  Alternatives: {'; '.join(others)}."


def _who(guilty: Any) -> str:
    parts = [
        *(f"rank {rank}" for rank in guilty.ranks),
        *(f"the link from rank {a} to rank {b}" for a, b in guilty.links),
        *(f"node {node}" for node in guilty.nodes),
    ]
    return ", ".join(parts) or "no rank is named"


def _read(paths: Sequence[str], now_s: float | None) -> tuple[Records, list[_Truncated]]:
    operations: list[Operation] = []
    rings: list[tuple[Path, Ring]] = []
    unknown: dict[int, str] = {}
    cut: list[_Truncated] = []
    for path, is_named in _files(paths):
        if is_ring(path):
            rings.append((path, read_ring(path)))
            continue
        found = _read_file(path, unknown, cut, is_named=is_named)
        if found is None and is_named:
            raise ConfigError(
                f"{path} is not a record of a run: neither a record ring, nor a dump of "
                "torch's flight recorder, nor JSON lines with an operation each"
            )
        operations += found or ()
    # A rank also keeps the ring of the previous attempt, whose calls have the same numbers.
    newest = max((ring.attempt for _, ring in rings), default=0)
    for path, ring in rings:
        operations += _of_ring(path, ring, unknown) if ring.attempt == newest else ()
    for path, rank, _ in cut:
        if rank is not None:
            unknown[rank] = f"{path} is truncated"
    return Records(operations=matched(operations), unknown=unknown, now_s=now_s), cut


def _files(paths: Iterable[str]) -> Iterator[tuple[Path, bool]]:
    for name in paths:
        path = Path(name)
        if path.is_dir():
            yield from ((each, False) for each in sorted(path.rglob("*")) if each.is_file())
        elif path.is_file():
            yield path, True
        else:
            raise ConfigError(f"{name} does not exist")


def _read_file(
    path: Path, unknown: dict[int, str], cut: list[_Truncated], *, is_named: bool
) -> list[Operation] | None:
    if path.name in (_INCIDENT, _REPORTS):
        return []
    data = path.read_bytes()
    if data[:1] == _PICKLE:
        try:
            return list(_of_dump(path, data))
        except CheckpointCorruptError as error:
            cut.append(_Truncated(path, _rank_of(path), str(error).partition(": ")[2]))
            return []
    # A run directory has other files with lines of JSON, such as its metrics.
    is_row = data[:1] == b"{" and b'"t_enter"' in data.partition(b"\n")[0]
    if is_row or (is_named and path.suffix == ".jsonl"):
        whole, end, rest = data.rpartition(b"\n")
        if end and rest and not _is_json(rest):
            number = whole.count(b"\n") + 2
            cut.append(_Truncated(path, None, f"its last line, {number}, is not JSON"))
            data = whole
        return list(_of_lines(path, data, unknown))
    return None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _rank_of(path: Path) -> int:
    named = _RANK.search(path.name)
    if named is None:
        raise ConfigError(f"{path}: the name of a dump must end with its rank")
    return int(named[1])


def _of_lines(path: Path, data: bytes, unknown: dict[int, str]) -> Iterator[Operation]:
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield _of_row(json.loads(line), unknown)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}, line {number}: not an operation ({what})") from error


def _of_row(row: Mapping[str, Any], unknown: dict[int, str]) -> Operation:
    rank, op, comm = int(row["rank"]), _named(row["op"]), str(row.get("comm") or "")
    end, place = row.get("t_exit"), [row.get(axis) for axis in ("dp", "pp", "tp")]
    members = tuple(int(member) for member in row["comm_ranks"]) if comm else ()
    if comm and op in {"send", "recv"}:
        peers = [row["peer"]] if row.get("peer") is not None else set(members) - {rank}
        if len(peers) == 1:
            comm, members = _channel(comm, op, rank, int(next(iter(peers))))
        else:
            comm, members = f"{comm} {rank}>?", (rank,)
            if end is None:
                unknown[rank] = "the peer of its transfer is not recorded"
    return Operation(
        rank=rank,
        op=op,
        comm=comm,
        seq=int(row["seq"]) if comm else 0,
        members=members,
        enter_s=float(row["t_enter"]),
        exit_s=None if end is None else float(end),
        size_bytes=int(row.get("bytes") or 0),
        dtype=str(row.get("dtype") or ""),
        history=str(row.get("hash") or ""),
        step=int(row.get("step") or 0),
        place=None if None in place else (int(place[0]), int(place[1]), int(place[2])),  # type: ignore[arg-type]
        node=str(row.get("node") or ""),
    )


def _named(name: str) -> str:
    """Return everstep's name of an operation."""
    plain = name.rpartition(":")[2].strip("_").lower()
    for end in ("_base", "_coalesced", "_tensor", "_into", "_single"):
        plain = plain.removesuffix(end)
    return _NAMES.get(plain, plain)


def _channel(comm: str, op: str, rank: int, peer: int) -> tuple[str, tuple[int, int]]:
    """Return the name of one direction of a pair, and (sender, receiver)."""
    ends = (rank, peer) if op == "send" else (peer, rank)
    return f"{comm} {ends[0]}>{ends[1]}", ends


def _of_ring(path: Path, ring: Ring, unknown: dict[int, str]) -> Iterator[Operation]:
    if ring.rank < 0:
        raise ConfigError(f"{path} does not name its rank: it had not joined an attempt")
    if ring.num_dropped:
        unknown[ring.rank] = f"{ring.num_dropped} groups did not fit its ring"
    known: dict[str, Any] = {
        "rank": ring.rank, "clock": str(path), "place": ring.place, "node": ring.node,
    }  # fmt: skip
    for state in ring.groups.values():
        if state.waiting_s and len(state.ranks) == 1:
            unknown[ring.rank] = f"it receives from any rank of {state.group}"
        yield Operation(
            op="", comm=state.group, seq=state.entered_seq, members=state.ranks,
            enter_s=_LONG_AGO, exit_s=_LONG_AGO, **known,
        )  # fmt: skip
    waits = any(state.waiting_s for state in ring.groups.values())
    for one in ring.records:
        times: dict[str, Any] = {
            "op": one.op, "step": one.step, "enter_s": one.enter_ns / 1e9,
            "exit_s": one.exit_ns / 1e9 if one.flags & FINISHED else None,
        }  # fmt: skip
        if one.group >= 0:
            state = ring.groups[one.group]
            yield Operation(
                comm=state.group,
                seq=one.seq,
                members=state.ranks,
                is_ahead=not (state.waiting_s and one.seq == state.finished_seq + 1),
                is_reached=not ring.on_device or one.seq <= state.entered_seq,
                size_bytes=one.size_bytes,
                dtype=DTYPES[one.dtype],
                history=f"{one.history:08x}" if one.history else "",
                **times,
                **known,
            )
        elif times["exit_s"] is None:
            # Within its own work, a rank may wait for calls that it made before.
            if not waits:
                yield Operation(**times, **known)
        elif own_s := _own_s(one, on_device=ring.on_device):
            yield Operation(own_s=own_s, **times, **known)


def _own_s(span: Record, *, on_device: bool) -> float:
    """Return the seconds of a finished span without waits for others; 0.0 if unknown."""
    if on_device and span.op != "data":
        return span.device_s
    return (span.exit_ns - span.enter_ns) / 1e9 - span.blocked_s


def _of_dump(path: Path, data: bytes) -> Iterator[Operation]:
    dump = read_pickle(data, where=str(path), allow=_NoClasses(path=path))
    rank = _rank_of(path)
    try:
        yield from _of_entries(rank, dump)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is not a dump of torch's flight recorder ({what})") from error


def _of_entries(rank: int, dump: Mapping[str, Any]) -> Iterator[Operation]:
    groups = {
        config["name"]: (f"{config['desc']}:{config['name']}", tuple(json.loads(config["ranks"])))
        for config in dump["pg_config"].values()
    }
    for key, status in dump["pg_status"].items():
        config = dump["pg_config"].get(key)
        if config is not None and status["last_enqueued_collective"] > 0:
            comm, members = groups[config["name"]]
            yield Operation(
                rank=rank, op="", comm=comm, seq=int(status["last_enqueued_collective"]),
                members=members, enter_s=_LONG_AGO, exit_s=_LONG_AGO,
            )  # fmt: skip
    for entry in dump["entries"]:
        comm, members = groups[entry["process_group"][0]]
        op, seq = _named(entry["profiling_name"]), int(entry["collective_seq_id"])
        if (transfer := _TRANSFER.match(entry["profiling_name"])) is not None:
            op, seq = transfer[1], int(entry["p2p_seq_id"])
            comm, members = _channel(comm, op, rank, members[int(transfer[4])])
        created_s = entry["time_created_ns"] / 1e9
        ended_ns = entry["time_discovered_completed_ns"]
        is_over = entry["retired"] or entry["state"] == "completed"
        yield Operation(
            rank=rank,
            op=op,
            comm=comm,
            seq=seq,
            members=members,
            enter_s=created_s,
            exit_s=(ended_ns / 1e9 if ended_ns else created_s) if is_over else None,
            size_bytes=sum(
                math.prod(sizes) * _WIDTHS.get(kind, 1)
                for sizes, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
            ),
            dtype=",".join(entry["input_dtypes"]),
        )
