"""Hand-written reports for the detector: what a keeper would have seen."""

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.detection import Detector, observe
from workers.protocol import GroupState, NodeReport, WorkerPhase, WorkerReport

WORKERS = ("w0", "w1", "w2", "w3")
ATTEMPT = 5


def calm(worker: str, rank: int) -> WorkerReport:
    """Return a healthy worker in the middle of a step, in no collective."""
    return WorkerReport(
        worker=worker,
        pid=1000 + rank,
        os_state="S",
        attempt=ATTEMPT,
        rank=rank,
        phase=WorkerPhase.FORWARD,
        step=7,
        micro_batch=0,
        moved_bytes=0,
        phase_s=0.1,
        beat_age_s=0.05,
        processor_s=0.0,
        step_s=0.2,
        loss=2.0,
        groups=(),
        beater_runs=100,
    )


def group(
    name: str, ranks: Iterable[int], seq: int, *, waiting_s: float = 0.0, op: str = "all_reduce"
) -> GroupState:
    """Return a rank's state in a group: waiting in ``seq``, or done with it."""
    return GroupState(
        group=name,
        ranks=ranks if isinstance(ranks, range) else tuple(ranks),
        entered_seq=seq,
        finished_seq=seq - 1 if waiting_s else seq,
        op=op,
        size_bytes=64,
        waiting_s=waiting_s,
    )


def watch(
    rows: Iterable[WorkerReport],
    *,
    for_s: float,
    state: Detector | None = None,
    from_s: float = 100.0,
    period_s: float = 0.25,
    node_of: dict[str, str] | None = None,
) -> tuple[Detector, float]:
    """Return the detector after the same rows were reported for ``for_s``, and the time then."""
    state = Detector() if state is None else state
    by_node: dict[str, list[WorkerReport]] = {}
    for row in rows:
        by_node.setdefault((node_of or {}).get(row.worker, "n0"), []).append(row)
    num_reports = round(for_s / period_s) + 1
    at_s = from_s
    for seq in range(num_reports):
        at_s = from_s + seq * period_s
        for node, members in by_node.items():
            state = observe(state, NodeReport(node=node, seq=seq, workers=tuple(members)), at_s)
    return state, at_s


def stop(row: WorkerReport, *, for_s: float = 2.0) -> WorkerReport:
    """Return the row of a process that was sent SIGSTOP ``for_s`` ago."""
    return replace(row, os_state="T", beat_age_s=for_s, phase_s=for_s)
