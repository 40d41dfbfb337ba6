"""Find ranks that made different calls, even if nothing hangs.

Members of a communicator must make the same calls in the same order. A call that differs in
operation, type or size is a ``mismatch``. If a rank's later calls equal the others' calls at a
constant offset, it has skipped calls or made extra ones: ``desync``, with wrong sums until
something hangs. If the records begin later, the hash of all earlier calls shows this; a record may
hold only that hash, and no operation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from orchestrator.diagnosis.records import Operation, at_line
from orchestrator.diagnosis.verdicts import Alternative, Guilty, Verdict, listed, waiting
from orchestrator.fault_kinds import FaultKind

_TRANSFER: Final = frozenset({"send", "recv"})
#: Operations whose payloads must be equal on all members. Some libraries allow others to differ, so
#: those count only in a hang.
_EQUAL: Final = frozenset({"all_reduce", "broadcast", "reduce", "transfer"})
_EQUAL_IF_STUCK: Final = _EQUAL | {"all_gather", "reduce_scatter"}
_SHIFTS: Final = (1, -1, 2, -2, 3, -3, 4, -4)

#: The parts that must be equal: operation, payload size for the operations above, and type.
_Calls: TypeAlias = tuple[tuple[str, int, str], ...]
_BySeq: TypeAlias = dict[int, dict[int, list[Operation]]]


def outnumbered(camps: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the camp of more than half of all; none without such a camp."""
    camps = list(camps)
    ranks = {rank for camp in camps for rank in camp}
    most = max(camps, key=len)
    return tuple(sorted(ranks - set(most))) if 2 * len(most) > len(ranks) else ()


def programs(rows: Mapping[int, list[Operation]]) -> list[Verdict]:
    """Return the verdict on the first calls that differ; none if all agree.

    ``rows`` has the operations of each rank, by time.
    """
    calls: dict[str, _BySeq] = defaultdict(lambda: defaultdict(dict))
    for rank, operations in rows.items():
        for one in operations:
            if one.comm and (one.op or one.history):
                calls[one.comm][one.seq].setdefault(rank, []).append(one)
    found = [verdict for comm in calls if (verdict := _of_comm(comm, calls, rows)) is not None]
    found.sort(key=lambda one: (not one.guilty.ranks, one.since_s or 0.0))
    return found[:1]


def _of_comm(
    comm: str, calls: Mapping[str, _BySeq], rows: Mapping[int, list[Operation]]
) -> Verdict | None:
    made = {seq: _made(by_rank) for seq, by_rank in sorted(calls[comm].items())}
    wrong = [seq for seq, by_rank in made.items() if len(set(by_rank.values())) > 1]
    if not wrong:
        return _by_history(comm, calls[comm])
    seq = wrong[0]
    here = calls[comm][seq]
    usual = _majority(made[seq]) or _majority_elsewhere(
        comm, seq, calls, rows, set(made[seq].values())
    )
    guilty = {rank for rank, call in made[seq].items() if usual is not None and call != usual}
    by = max(guilty, default=min(made[seq]))
    is_shifted = _is_shifted(made, wrong, by)
    told = {
        call: [rank for rank in made[seq] if made[seq][rank] == call] for call in made[seq].values()
    }
    said = "; ".join(
        f"{listed(who)} called {_text(call)}{at_line(here[rank][-1] for rank in who)}"
        for call, who in told.items()
    )
    after = " Its later calls equal the others' calls at a constant offset." if is_shifted else ""
    named = Guilty.of(guilty, (), {one.node for r in guilty for one in here[r] if one.node})
    return Verdict(
        kind=FaultKind.DESYNC if is_shifted else FaultKind.MISMATCH,
        guilty=named,
        confidence=0.95 if guilty else 0.6,
        since_s=min(one.enter_s for each in here.values() for one in each),
        evidence=f"{said[0].upper()}{said[1:]}, as number {seq} of {comm}.{after}",
        alternatives=()
        if guilty
        else tuple(Alternative(FaultKind.MISMATCH, Guilty.of(who)) for who in told.values()),
    )


def _by_history(comm: str, by_seq: _BySeq) -> Verdict | None:
    for seq, by_rank in sorted(by_seq.items()):
        last = {rank: ops[-1] for rank, ops in sorted(by_rank.items()) if ops[-1].history}
        camps: dict[str, list[int]] = defaultdict(list)
        for rank, one in last.items():
            camps[one.history].append(rank)
        calls = [one for one in last.values() if one.op]
        if len(camps) < 2 or not calls:  # noqa: PLR2004
            continue
        guilty = outnumbered(camps.values())
        held = [one for one in calls if one.exit_s is None]
        where = f", in which {waiting(one.rank for one in held)}{at_line(held)}" if held else ""
        told = " and ".join(map(listed, camps.values()))
        return Verdict(
            # If all made the call alike, an earlier one differed. If some did not make it, they
            # made another.
            kind=FaultKind.DESYNC if len(calls) == len(last) else FaultKind.MISMATCH,
            guilty=Guilty.of(guilty),
            confidence=0.9 if guilty else 0.6,
            evidence=f"Up to call number {seq} of {comm}{where}, {told} "
            "made different calls: the hashes of all of their calls differ.",
        )
    return None


def _made(by_rank: Mapping[int, list[Operation]]) -> dict[int, _Calls]:
    calls = {rank: own for rank, ops in by_rank.items() if (own := [one for one in ops if one.op])}
    every = [one for own in calls.values() for one in own]
    sized = _EQUAL_IF_STUCK if any(one.exit_s is None for one in every) else _EQUAL
    # If one of them has no known type, types are not compared.
    is_typed = all(one.dtype for one in every)

    def comparable(one: Operation) -> tuple[str, int, str]:
        op = "transfer" if one.op in _TRANSFER else one.op
        return op, one.size_bytes if op in sized else 0, one.dtype if is_typed else ""

    return {rank: tuple(map(comparable, own)) for rank, own in calls.items()}


def _majority(made: Mapping[int, _Calls]) -> _Calls | None:
    (call, times), *_ = Counter(made.values()).most_common(1)
    return call if 2 * times > len(made) else None


def _majority_elsewhere(
    comm: str,
    seq: int,
    calls: Mapping[str, _BySeq],
    rows: Mapping[int, list[Operation]],
    options: set[_Calls],
) -> _Calls | None:
    """Return the call that most ranks made as number ``seq`` in similar communicators."""
    like = _shape(calls[comm][seq], rows)
    votes: Counter[_Calls] = Counter()
    for by_seq in calls.values():
        if like is not None and seq in by_seq and _shape(by_seq[seq], rows) == like:
            votes.update(call for call in _made(by_seq[seq]).values() if call in options)
    ranked = votes.most_common(2)
    return ranked[0][0] if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]) else None


def _shape(
    by_rank: Mapping[int, list[Operation]], rows: Mapping[int, list[Operation]]
) -> tuple[object, ...] | None:
    """Return which axes of the mesh a communicator spans, and its stage; None if unknown."""
    members = {member for ops in by_rank.values() for member in ops[0].members}
    places = [rows[member][0].place for member in members if rows.get(member)]
    known = [place for place in places if place is not None]
    if not known or len(known) < len(places):
        return None
    spans = tuple(len(set(axis)) > 1 for axis in zip(*known, strict=True))
    return spans, frozenset(stage for _, stage, _ in known)


def _is_shifted(made: Mapping[int, Mapping[int, _Calls]], wrong: Sequence[int], rank: int) -> bool:
    """Return whether the calls of ``rank`` from the first wrong one on are the others', shifted."""
    after = {seq: by for seq, by in made.items() if seq >= wrong[0]}
    mine = {seq: by[rank] for seq, by in after.items() if rank in by}
    theirs = {seq: call for seq, by in after.items() for other, call in by.items() if other != rank}
    # A single different call in the middle is not a shift, but at the end it may be one.
    if len(wrong) == 1 and not (len(mine) == 1 < len(theirs)):
        return False

    def fits(shift: int) -> bool:
        both = [seq for seq in mine if seq + shift in theirs]
        return bool(both) and all(mine[seq] == theirs[seq + shift] for seq in both)

    return any(fits(shift) for shift in _SHIFTS)


def _text(calls: _Calls) -> str:
    return " and ".join(
        " ".join([op, *([f"of {size_bytes} bytes"] if size_bytes else []), dtype]).strip()
        for op, size_bytes, dtype in calls
    )
