"""Reports of the keepers of a large run, and the observer that takes them in.

Nodes of 8 GPUs, in groups of the world, 8 tensor-parallel ranks each, and data-parallel ones across
nodes. Three times are replayed: training, one in which one rank computes and the others wait, and
one in which no member is missing.
``cores`` is processor time by watched time, of taking reports in and judging them. In it are the
``unpickling_cores``: Ray unpickles in another thread of the process, under the same lock.
``judged_ms_max`` is by the clock.
"""

import pickle
from functools import lru_cache
from sys import intern
from time import perf_counter, process_time
from typing import Any

from orchestrator.core import events as ev
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.observer import Observer
from workers.keeper.actor import still_period_s
from workers.protocol import GroupState, NodeReport, WorkerPhase, WorkerReport
from workers.settings import ParallelSettings

NUM_GPUS = 8
STEP_S = 1.0
#: A report of each rank in so many seconds.
PERIOD_S = 2.0
#: Reports that are timed together: to ask for processor time may take longer than one report does.
NUM_TIMED = 64


def worker_report(rank: int, num_nodes: int, *, step: int, waiting_s: float) -> WorkerReport:
    """Return the report on a rank that has done ``step``, and waits in the next if it waits."""
    node, local = divmod(rank, NUM_GPUS)
    members = {  # as a keeper tells them: one after the other, or every eighth
        "world": _ranks(0, num_nodes * NUM_GPUS),
        intern(f"tp[{node}]"): _ranks(node * NUM_GPUS, (node + 1) * NUM_GPUS),
        intern(f"dp[{local}]"): _ranks(local, num_nodes * NUM_GPUS, NUM_GPUS),
    }
    groups = tuple(
        GroupState(
            group=name,
            ranks=ranks,
            entered_seq=10 * step + (name == "world" and waiting_s > 0.0),
            finished_seq=10 * step,
            op="all_reduce",
            size_bytes=1 << 20,
            waiting_s=waiting_s if name == "world" else 0.0,
        )
        for name, ranks in members.items()
    )
    return WorkerReport(
        worker=f"w{rank:04d}", pid=1000 + rank, os_state="S", attempt=1, rank=rank,
        phase=WorkerPhase.FORWARD, step=step, micro_batch=0, moved_bytes=0, phase_s=waiting_s,
        beat_age_s=0.05, processor_s=float(step), step_s=STEP_S, loss=2.0, groups=groups,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _ranks(start: int, stop: int, step: int = 1) -> range:
    """Return one object for all ranks of a node, as its keeper does."""
    return range(start, stop, step)


class Replay:
    """A controller's observer, fed with reports of all nodes."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.at_s = 100.0
        self.judged_s_max = 0.0
        self.events: list[ev.Event] = []
        self._observer = Observer(
            Inbox(at_s=lambda: self.at_s, post=self.events.append),
            on_formed=lambda *_: None,
            node_silent=lambda *_: None,
            patience=3.0,
            parallel=ParallelSettings(),
        )
        ranks = range(num_nodes * NUM_GPUS)
        self._observer.begin(1, tuple(f"w{rank:04d}" for rank in ranks), 0)
        self._seq = 0

    def reports(self, *, step: int, waiting_s: float, missing: int = -1) -> list[NodeReport]:
        """Return one report of each node; ``missing`` waits for nothing."""
        self._seq += 1
        return [
            NodeReport(
                node=f"n{node}",
                seq=self._seq,
                workers=tuple(
                    worker_report(
                        rank,
                        self.num_nodes,
                        step=step,
                        waiting_s=0.0 if rank == missing else waiting_s,
                    )
                    for rank in range(node * NUM_GPUS, (node + 1) * NUM_GPUS)
                ),
            )
            for node in range(self.num_nodes)
        ]

    def take(self, reports: list[NodeReport], over_s: float) -> tuple[float, float]:
        """Take ``reports`` in, evenly over a time; return processor seconds, and of unpickling."""
        packed = [pickle.dumps(report, protocol=5) for report in reports]
        # A controller holds the last report of each worker, and no queue of them.
        reports.clear()
        used_s = unpickling_s = 0.0
        for first in range(0, len(packed), NUM_TIMED):
            began_s = process_time()
            unpacked: list[NodeReport] = [
                pickle.loads(each) for each in packed[first : first + NUM_TIMED]
            ]
            unpacked_s = process_time()
            for report in unpacked:
                self.at_s += over_s / len(packed)
                self._observer.on_report(report)
                taken_s = perf_counter()
                self._observer.judge()
                self.judged_s_max = max(self.judged_s_max, perf_counter() - taken_s)
            used_s += process_time() - unpacked_s
            unpickling_s += unpacked_s - began_s
        return used_s, unpickling_s

    def during(self, seconds: float, *, period_s: float, **how: Any) -> dict[str, float]:
        """Return the costs of a time; ``how`` as for ``reports``, by the time that has passed."""
        used_s = unpickling_s = passed_s = self.judged_s_max = 0.0
        num_reports = 0
        while passed_s < seconds:
            told = {
                name: value(passed_s) if callable(value) else value for name, value in how.items()
            }
            reports = self.reports(**told)
            num_reports += len(reports)
            used, unpickling = self.take(reports, period_s)
            used_s, unpickling_s, passed_s = (
                used_s + used,
                unpickling_s + unpickling,
                passed_s + period_s,
            )
        return {
            "cores": round((used_s + unpickling_s) / passed_s, 3),
            "unpickling_cores": round(unpickling_s / passed_s, 3),
            "reports_per_s": round(num_reports / passed_s),
            "judged_ms_max": round(1e3 * self.judged_s_max, 1),
        }


def watch(num_nodes: int, seconds: float) -> dict[str, Any]:
    """Return what it costs to watch so many nodes, for each of three times."""
    replay = Replay(num_nodes)
    training = replay.during(
        seconds,
        period_s=PERIOD_S,
        step=lambda passed_s: 1 + int(passed_s / STEP_S),
        waiting_s=0.0,
    )
    hang = {"step": 1 + int(seconds / STEP_S), "waiting_s": lambda passed_s: 0.1 + passed_s}
    still_s = still_period_s(num_nodes * NUM_GPUS)
    return {
        "training": training,
        "one_computes": replay.during(seconds, period_s=still_s, missing=NUM_GPUS + 1, **hang),
        "all_wait": replay.during(seconds, period_s=still_s, **hang),
        "events": len(replay.events),
    }
