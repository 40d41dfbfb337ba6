"""The waits of members, from their reports: the wait graph, and their last calls as records."""

from collections.abc import Iterator, Mapping

from orchestrator.diagnosis import Operation, WaitGraph, wait_graph
from workers.protocol import GroupState, WorkerPhase, WorkerReport
from workers.records import DTYPES, OP_CODES, history_before


def graph_of(reports: Mapping[int, WorkerReport | None], *, attempt: int) -> WaitGraph:
    """Return the wait graph of the members, whose ``reports`` are by rank.

    A member without a report or in another attempt has called nothing.
    """
    present = _present(reports, attempt)
    graph = wait_graph({rank: row.groups for rank, row in present.items()}, reports)
    # No group exists yet; forming ends when every member has come.
    not_come = frozenset(reports) - frozenset(present)
    forming = {
        rank: not_come
        for rank, row in present.items()
        if row.phase is WorkerPhase.FORMING and rank not in graph.waits_for
    }
    return WaitGraph.of({**graph.waits_for, **forming}) if forming else graph


def _present(reports: Mapping[int, WorkerReport | None], attempt: int) -> dict[int, WorkerReport]:
    return {rank: row for rank, row in reports.items() if row and row.attempt == attempt}


def waits(row: WorkerReport) -> Iterator[GroupState]:
    """Yield the groups in which the worker waits for a collective."""
    return (group for group in row.groups if group.waiting_s > 0.0)


def records_of(reports: Mapping[int, WorkerReport | None], *, attempt: int) -> Iterator[Operation]:
    """Yield the last calls of the members, in the groups in which one of them waits."""
    rows = _present(reports, attempt)
    names = {group.group for row in rows.values() for group in waits(row)}
    for rank, row in rows.items():
        for group in row.groups:
            if group.group in names:
                yield from _calls(rank, row, group)


def _calls(rank: int, row: WorkerReport, group: GroupState) -> Iterator[Operation]:
    """Yield the last call in a group, and what is known of the call before and of one waited in."""
    last, past = group.entered_seq, group.history
    waits_in = group.finished_seq + 1 if group.waiting_s else 0
    if past:
        past = history_before(past, OP_CODES[group.op], group.dtype, group.size_bytes)
    for seq, history in {waits_in: 0, last - 1: past, last: group.history}.items():
        is_last = seq == last
        if seq > 0:
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
