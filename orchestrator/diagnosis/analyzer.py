"""Apply all rules to records."""

from collections import defaultdict

from orchestrator.diagnosis.hang import hangs
from orchestrator.diagnosis.programs import programs
from orchestrator.diagnosis.records import Operation, Records, overlap
from orchestrator.diagnosis.slow import slow_ranks
from orchestrator.diagnosis.transfers import slow_transfers
from orchestrator.diagnosis.verdicts import Verdict
from orchestrator.fault_kinds import FaultKind


def diagnose(records: Records) -> tuple[Verdict, ...]:
    """Return what is wrong, the cause of a hang first; empty if nothing is."""
    if not records.operations:
        nothing = "There are no records of any operation."
        return (Verdict(kind=FaultKind.UNDECIDED, confidence=1.0, evidence=nothing),)
    rows = _by_rank(records)
    why = stopped(records)
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
            *why,
            Verdict(kind=FaultKind.UNDECIDED, confidence=1.0, evidence=mixed),
        )
    return (*why, *slow_ranks(rows), *slow_transfers(rows))


def stopped(records: Records) -> list[Verdict]:
    """Return why ranks hang: for no other reason if they called different things."""
    return programs(_by_rank(records)) or hangs(records)


def _by_rank(records: Records) -> dict[int, list[Operation]]:
    rows: dict[int, list[Operation]] = defaultdict(list)
    for one in sorted(records.operations, key=lambda each: (each.enter_s, each.seq)):
        rows[one.rank].append(one)
    return rows
