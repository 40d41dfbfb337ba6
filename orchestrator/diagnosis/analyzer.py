"""Apply all rules to records."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.diagnosis.hang import hangs
from orchestrator.diagnosis.programs import programs
from orchestrator.diagnosis.records import Operation, Records, overlap
from orchestrator.diagnosis.slow import slow_ranks
from orchestrator.diagnosis.transfers import slow_transfers
from orchestrator.diagnosis.verdicts import Verdict
from orchestrator.fault_kinds import FaultKind

#: Kinds of mistakes of the program.
_MISTAKES = frozenset({FaultKind.MISMATCH, FaultKind.DESYNC})


def diagnose(records: Records) -> tuple[Verdict, ...]:
    """Return what is wrong, the cause of a hang first; empty if nothing is."""
    if not records.operations:
        nothing = "There are no records of any operation."
        return (Verdict(kind=FaultKind.UNDECIDED, confidence=1.0, evidence=nothing),)
    rows = _by_rank(records)
    stopped = _stopped(records, rows)
    found = next(filter(None, map(overlap, rows.values())), None)
    if found is not None:
        before, one = found
        mixed = (
            f"The times of steps overlap: rank {one.rank} begins {one.op} of step {one.step} at "
            f"{one.enter_s:.3f} s, during its {before.op} of step {before.step}, which lasts from "
            f"{before.enter_s:.3f} s to {before.exit_s:.3f} s. So slow ranks were not "
            "searched for: give each rank's times on one clock."
        )
        return (
            *stopped,
            Verdict(kind=FaultKind.UNDECIDED, confidence=1.0, evidence=mixed),
        )
    return (*stopped, *slow_ranks(rows), *slow_transfers(rows))


def mistake(operations: Iterable[Operation]) -> Verdict | None:
    """Return the mistake of the program that made these calls; None if none is seen."""
    records = Records(operations=tuple(operations))
    found = _stopped(records, _by_rank(records))
    return next((one for one in found if one.kind in _MISTAKES), None)


def _by_rank(records: Records) -> dict[int, list[Operation]]:
    rows: dict[int, list[Operation]] = defaultdict(list)
    for one in sorted(records.operations, key=lambda each: (each.enter_s, each.seq)):
        rows[one.rank].append(one)
    return rows


def _stopped(records: Records, rows: Mapping[int, list[Operation]]) -> list[Verdict]:
    """Return why ranks hang: for no other reason if they called different things."""
    return programs(rows) or hangs(records)
