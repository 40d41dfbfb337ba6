"""Turn the last reports on an attempt's members into the graph of their waits, and into records."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from orchestrator.diagnosis.graph import WaitGraph, wait_graph
from orchestrator.diagnosis.records import Doing, Operation, Records
from orchestrator.fault_kinds import FaultKind
from ucp_core.numerics import counted
from workers.protocol import GONE, GroupState, WorkerPhase, WorkerReport
from workers.telemetry import DTYPES, OP_CODES, history_before

#: A process that has not beaten for this long is silent; it should beat ten times a second.
_SILENT_S: Final = 1.0
_RUNS: Final = frozenset("RD")
#: The states of an absent rank that the kernel's letters for its process show.
OS_STATES: Final = {
    **dict.fromkeys(GONE, Doing(FaultKind.DEAD, "has no living process")),
    "T": Doing(FaultKind.FROZEN, "is stopped by a signal"),
    "t": Doing(FaultKind.FROZEN, "is stopped by a debugger"),
}


def graph_of(reports: Mapping[int, WorkerReport], ranks: Collection[int]) -> WaitGraph:
    """Return the wait graph of ``ranks``, given the reports on those that are in the attempt.

    A rank without a report has called nothing.
    """
    graph = wait_graph({rank: row.groups for rank, row in reports.items()}, ranks)
    # No group exists yet; forming ends when every member has come.
    not_come = frozenset(ranks) - frozenset(reports)
    forming = {
        rank: not_come
        for rank, row in reports.items()
        if row.phase is WorkerPhase.FORMING and rank not in graph.waits_for
    }
    return WaitGraph.of({**graph.waits_for, **forming}) if forming else graph


def waits(row: WorkerReport) -> Iterator[GroupState]:
    """Yield the groups in which the worker waits for a collective."""
    return (group for group in row.groups if group.waiting_s > 0.0)


def records_of(
    reports: Mapping[int, WorkerReport],
    graph: WaitGraph,
    *,
    unknown: Mapping[int, str],
    doing: Mapping[int, Doing],
) -> Records:
    """Return the last calls of the ranks, in the groups in which one of them waits.

    The other arguments are as in ``Records``. Times are seconds after the reports.
    """
    names = {group.group for row in reports.values() for group in waits(row)}
    calls = (
        one
        for rank, row in reports.items()
        for group in row.groups
        if group.group in names
        for one in _calls(rank, row, group)
    )
    return Records(operations=tuple(calls), unknown=unknown, graph=graph, doing=doing)


def _calls(rank: int, row: WorkerReport, group: GroupState) -> Iterator[Operation]:
    """Yield the last call in a group, and what is known of the call before and of one waited in."""
    last, past = group.entered_seq, group.history
    waits_in = group.finished_seq + 1 if group.waiting_s else 0
    if past:
        past = history_before(past, OP_CODES[group.op], group.dtype, group.size_bytes)
    for seq, history in {waits_in: 0, last - 1: past, last: group.history}.items():
        is_last = seq == last
        if seq > 0 and (history or seq in {waits_in, last}):
            yield Operation(
                rank=rank,
                op=group.op if is_last else "",
                comm=group.group,
                seq=seq,
                members=group.ranks,
                enter_s=-group.waiting_s,
                exit_s=None if seq == waits_in else 0.0,
                size_bytes=group.size_bytes if is_last else 0,
                dtype=DTYPES[group.dtype] if is_last else "",
                history=f"{history:08x}" if history else "",
                line=row.place,
            )


def doing(row: WorkerReport) -> Doing:
    """Return what an absent rank does, from its last report.

    If its device is behind, its process has done its part: the device is stuck or computes for
    long. C4 (arXiv 2406.04594, section 3) compares arrivals in the kernels themselves.
    """
    if row.os_state in OS_STATES:
        return OS_STATES[row.os_state]
    is_silent = row.beat_age_s >= _SILENT_S
    if is_silent and row.os_state not in _RUNS:
        held = f"has held the interpreter's lock for {row.beat_age_s:.1f} s"
        return Doing(FaultKind.INTERPRETER_HELD, held)
    for group in row.groups:
        # A process whose interpreter is held cannot query its device.
        if group.num_ahead and not is_silent:
            calls = counted(group.num_ahead, "call")
            behind = f"has a device that is {calls} behind in {group.group}"
            return Doing(FaultKind.DEVICE_STUCK, behind)
    span, span_s = (row.digest.span, row.digest.span_s) if row.digest else ("", 0.0)
    if span == "data":
        return Doing(FaultKind.SLOW_DATA, f"has waited for data for {span_s:.1f} s")
    span, span_s = (span, span_s) if span else (f"phase {row.phase}", row.phase_s)
    return Doing(FaultKind.ABSENT, f"has been in {span} for {span_s:.1f} s")
