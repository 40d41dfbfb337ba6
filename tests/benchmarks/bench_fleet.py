"""Measures the controller's costs of ten thousand nodes: decisions, detector, journal, page.

    python -m tests.benchmarks fleet [--nodes 10000] [--hours 1] [--storms rack pod ...]
        [--parts decisions detection] [--seconds 4] [--histories 0]

The production core, detector, journal, metrics and page; only the machines are not there
(``fleet_shell``). Nodes of 8 ranks break as those of ``tests/fixtures/node_faults`` did, as often
for each node. Then storms come, one after the other. ``fleet_watch`` replays the keepers' reports.

Times are processor times of one thread. ``decision`` is that of folding one event into the state,
``record`` that of writing it and its orders to the journal and of folding them into the numbers,
which the loop does as well. ``journal`` is of the start and the trace: folded from its first
record on (of a day: by the trace alone), and as a restarted controller does it, from the compacted
one on.
"""

import argparse
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any, Final

from orchestrator import core
from orchestrator.config import RunConfig, load
from orchestrator.report import RunDocument, Seen, tell
from orchestrator.shell.capacity import NodeView, told_nodes
from orchestrator.shell.controller import collect_seldom
from orchestrator.shell.serve import NUM_NODES, NUM_TOLD, Live, RunCollector
from orchestrator.shell.storage import JournalFile, read_segments
from tests.benchmarks.common import percentile
from tests.benchmarks.fleet_shell import NUM_RANKS, Costs, FleetShell
from tests.benchmarks.fleet_watch import watch, worker_report
from tests.simulation.campaign import run_campaign
from tests.support.outages import node_faults
from ucp_core.storage import LocalStore
from workers.protocol import WorkerReport

#: The trace: 400 servers.
_TRACE_NODES: Final = 400
#: Nodes of a rack share a switch.
_RACK: Final = 32
_RECOVERY_S: Final = 3600.0
#: Bounds that must hold for 10,000 nodes.
BARS: Final = {
    "worst decision, ms": 50.0,
    "detection, cores": 0.5,
    "fold of a day's journal, s": 10.0,
    "scrape, s": 0.2,
}


def config_of(num_nodes: int) -> RunConfig:
    """Return the configuration of a run that may use all nodes, and lose half of them."""
    most = num_nodes * NUM_RANKS
    return load(
        f"run: {{directory: runs/fleet, name: fleet, script: train.py}}\n"
        f"workers: {{min: {most // 2}, max: {most}}}\n"
        f"train: {{steps: 1000000, global_batch: {2 * most}, micro_batch: 1}}\n"
        "recovery: {infrastructure_failures_max: 10000, preemptions_max: 10000}\n"
    )


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


def told(costs: Costs) -> dict[str, Any]:
    """Return how long decisions took, and which took longest."""
    decide_s = [s for s, _ in costs.decide_s]
    worst_s, kind = max(costs.decide_s)
    record_s = [s for s, _ in costs.record_s] or [0.0]
    return {
        "events": len(decide_s),
        "decision_us_p50": round(1e6 * percentile(decide_s, 0.5), 1),
        "decision_us_p99": round(1e6 * percentile(decide_s, 0.99), 1),
        "decision_ms_max": round(1e3 * worst_s, 1),
        "worst": kind,
        "record_us_p50": round(1e6 * percentile(record_s, 0.5), 1),
        "record_ms_max": round(1e3 * max(record_s), 1),
        "all_s": round(sum(decide_s) + sum(record_s), 1),
    }


class Fleet:
    """One run of ``num_nodes`` nodes, from its start through faults and storms."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self.num_nodes = num_nodes
        self.folder = folder
        self.config = config_of(num_nodes)
        self.rules = self.config.rules()
        self.report: dict[str, Any] = {}
        self._journal_bytes = 0
        gc.collect()
        before_bytes = resident_bytes()
        journal = JournalFile(LocalStore(), str(folder), incarnation=1, before_bytes=0)
        self.shell = FleetShell(self.rules, num_nodes, max(1, num_nodes // 100), journal)
        self.shell.run_until(lambda: self.shell.trains, _RECOVERY_S)
        self._take("start")
        self._start_bytes, self._hours = self._journal_bytes, 0.0
        gc.collect()
        self.memory_bytes = resident_bytes() - before_bytes

    def _take(self, name: str) -> None:
        shell = self.shell
        grown, self._journal_bytes = (
            shell.journal.journal_bytes - self._journal_bytes,
            shell.journal.journal_bytes,
        )
        self.report[name] = {**told(shell.costs), "journal_megabytes": round(grown / 1e6, 1)}
        shell.costs = Costs()
        print(json.dumps({name: self.report[name]}), flush=True)

    def trace(self, hours: float) -> None:
        """Have nodes fail as in the trace, as often for each."""
        scale = _TRACE_NODES / self.num_nodes
        shell, began_s, num = self.shell, self.shell.now_s, 0
        end_s = began_s + 3600.0 * hours
        faults = node_faults()
        for fault in faults:
            at_s = began_s + (fault.begin_s - faults[0].begin_s) * scale
            if at_s >= end_s:
                break
            shell.run_for(max(0.0, at_s - shell.now_s))
            if not shell.trains:
                shell.run_until(lambda: shell.trains, _RECOVERY_S)
            node = next(islice(shell.alive, 7 * num % len(shell.alive), None))
            num += 1
            if fault.shows == "drain":
                shell.notice(node, 120.0)
            elif fault.shows == "gone":
                shell.lose([node])
                shell.join()
            elif members := shell.members_on(node):
                shell.crash(members[0])
        shell.run_for(max(0.0, end_s - shell.now_s))
        shell.run_until(lambda: shell.trains, _RECOVERY_S)
        self._take("trace")
        self.report["trace"] |= {"hours": hours, "faults": num}
        self._hours = hours

    def storm(self, name: str) -> None:
        """Play one storm, and what follows until it trains again at its size."""
        storms: dict[str, Callable[[], None]] = {
            "rack": lambda: self._lose(_RACK),
            "pod": lambda: self._lose(1000),
            "switch": self._switch,
            "storage": self._storage,
            "notices": lambda: self._notices(500, replaced=True),
            "unreplaced": lambda: self._notices(250, replaced=False),
        }
        attempt = self.shell.state.attempt.number
        storms[name]()
        shell = self.shell
        shell.run_until(lambda: shell.trains and shell.state.attempt.number > attempt, _RECOVERY_S)
        shell.run_for(300.0)
        shell.run_until(lambda: shell.trains, _RECOVERY_S)
        self._take(name)

    def _first(self, num: int) -> list[str]:
        return list(islice(self.shell.alive, min(num, self.num_nodes // 4)))

    def _lose(self, num: int) -> None:
        lost = self._first(num)
        self.shell.lose(lost)
        for _ in lost:
            self.shell.join()

    def _switch(self) -> None:
        """The nodes behind it reach no other node; the others report this, and then the nodes are
        lost."""
        behind = self._first(_RACK)
        self.shell.cut_off(behind)
        self.shell.run_for(20.0)
        self.shell.lose(behind, cause="silent")
        for _ in behind:
            self.shell.join()

    def _storage(self) -> None:
        """It does not answer for ten minutes, in which a worker dies."""
        self.shell.stored = False
        self.shell.crash(self.shell.members_on(self._first(1)[0])[0])
        self.shell.run_for(600.0)
        self.shell.stored = True

    def _notices(self, num: int, *, replaced: bool) -> None:
        for node in self._first(num):
            self.shell.notice(node, 120.0, replaced=replaced)
            self.shell.run_for(60.0 / num)

    def journal(self) -> dict[str, Any]:
        """Fold the journal, all of it and as a restarted controller does."""
        segments = read_segments(LocalStore(), str(self.folder))
        num_bytes = sum(map(len, segments))
        start, trace = segments[0][: self._start_bytes], segments[0][self._start_bytes :]
        began_s = process_time()
        folded = core.fold_on(core.Folded(), [start], self.rules)
        start_s = process_time() - began_s
        began_s = process_time()
        folded = core.fold_on(folded, [trace, *segments[1:]], self.rules)
        trace_s = process_time() - began_s
        assert folded.state == self.shell.state, "the fold differs from the run"
        basis = "bench"
        place = self.shell.journal.place
        began_s = process_time()
        document = core.Compaction(basis=basis, place=place, folded=folded).document()
        wrote_s = process_time() - began_s
        began_s = process_time()
        again = core.Compaction.read(document, basis)
        read_s = process_time() - began_s
        assert again.folded.state == self.shell.state, "the compacted state differs"
        return {
            "hours": self._hours,
            "megabytes": round(num_bytes / 1e6, 1),
            "records": folded.seq + 1,
            "fold_of_the_start_s": round(start_s, 2),
            "fold_of_a_day_s": round(trace_s * 24.0 / self._hours, 2),
            "compacted_megabytes": round(len(document) / 1e6, 1),
            "compacting_s": round(wrote_s, 2),
            "restart_s": round(read_s, 2),
        }

    def serve(self) -> dict[str, Any]:
        """Return time and size of a scrape and of the page's document."""
        shell, state = self.shell, self.shell.state
        reports: dict[str, WorkerReport] = {}
        for rank, number in enumerate(state.attempt.members):
            name = state.fleet.workers[number].name
            row = worker_report(rank, self.num_nodes, step=1, waiting_s=0.0)
            reports[name] = replace(row, worker=name, attempt=state.attempt.number)
        views = {
            node.name: NodeView(node=node.name, raylet_address=("10.0.0.1", 1))
            for node in state.fleet.nodes.values()
            if node.alive
        }
        keepers = [{"node": n, "held_bytes": 1 << 36, "budget_bytes": 1 << 37} for n in views]
        redundancy = {**_REDUNDANCY, "keepers": keepers}
        seen_at_s = dict.fromkeys(reports, shell.now_s)

        def told(num_told: int | None = None, num_nodes: int | None = None) -> RunDocument:
            described = core.describe(shell.state, num_told, num_nodes=num_nodes)
            return tell(
                described,
                shell.stats,
                self.config,
                seen=Seen(
                    at_s=shell.now_s,
                    reports=reports,
                    seen_at_s=seen_at_s,
                    nodes=told_nodes(views, described, shell.now_s, num_nodes or num_told),
                    node_states=Counter(view.state for view in views.values()),
                ),
                url="http://head:8080",
                step_s={"p50": 10.0, "p99": 11.0},
                redundancy=redundancy,
                cadence=_CADENCE,
            )

        collector = RunCollector(run="fleet", run_id="fleet-1", told=lambda: told(NUM_TOLD))
        live = Live(
            config=self.config,
            store=LocalStore(),
            path=str(self.folder),
            told=lambda: told(num_nodes=NUM_NODES),
            reports=reports,
            at_s=lambda: shell.now_s,
        )
        loop_s, make = _timed(collector.prepare)
        text_s, text = _timed(make)
        note_s, _ = _timed(live.note)
        page_s, page = _timed(live.made)
        return {
            "scrape_s": round(loop_s + text_s, 3),
            "scrape_on_the_loop_s": round(loop_s, 3),
            "scrape_megabytes": round(len(text) / 1e6, 2),
            "series": text.count(b"\n") - text.count(b"\n#"),
            "page_s": round(page_s, 3),
            "page_megabytes": round(len(page) / 1e6, 2),
            "page_each_second_s": round(note_s, 3),
        }


_REDUNDANCY: Final[dict[str, Any]] = {
    "step": 1,
    "stored_step": 1,
    "node_losses_survived": 1,
    "mechanism": "partner copy",
    "problems": [],
    "reduced_s": 0.0,
    "reduced_for_s": 0.0,
}
_CADENCE: Final = dict.fromkeys(
    (
        "step_s",
        "cost_share",
        "cost_share_max",
        "snapshot_stall_s",
        "checkpoint_stall_s",
        "snapshot_steps",
        "checkpoint_steps",
    ),
    1.0,
)


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began_s = process_time()
    made = do()
    return process_time() - began_s, made


def histories(num: int) -> dict[str, float]:
    """Return how fast the core decides in histories of small runs (``tests.simulation``)."""
    took_s, campaign = _timed(lambda: run_campaign(range(num)))
    assert not campaign.failures, campaign.failures
    return {
        "histories_per_s": round(num / took_s, 1),
        "events_per_s": round(campaign.num_events / took_s),
    }


def against_bars(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each bar with what was measured."""
    rows = [row["decision_ms_max"] for row in report.get("decisions", {}).values()]
    found = {
        "worst decision, ms": max(rows, default=None),
        "detection, cores": report.get("detection", {}).get("training", {}).get("cores"),
        "fold of a day's journal, s": report.get("journal", {}).get("fold_of_a_day_s"),
        "scrape, s": report.get("served", {}).get("scrape_s"),
    }
    for name, bar in BARS.items():
        if found[name] is not None:
            yield {"what": name, "bar": bar, "measured": found[name], "met": found[name] <= bar}


def main() -> None:
    """Print one JSON object for each part, and one of all."""
    parser = argparse.ArgumentParser(description="Time the controller of a large fleet.")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=1.0, help="of the trace of faults")
    storms = ["rack", "pod", "switch", "storage", "notices", "unreplaced"]
    parser.add_argument("--storms", nargs="*", choices=storms, default=storms)
    parts = ["decisions", "detection"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seconds", type=float, default=4.0, help="of reports, of each kind")
    parser.add_argument("--histories", type=int, default=0, help="of small runs, simulated")
    options = parser.parse_args()
    # As in the controller's process.
    collect_seldom()
    report: dict[str, Any] = {"nodes": options.nodes, "ranks": options.nodes * NUM_RANKS}
    if "detection" in options.parts:
        report["detection"] = watch(options.nodes, options.seconds)
        print(json.dumps(report["detection"]), flush=True)
    if "decisions" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(options.nodes, Path(folder))
            if options.hours:
                fleet.trace(options.hours)
                report["journal"] = fleet.journal()
            report["state_megabytes"] = round(fleet.memory_bytes / 1e6, 1)
            for name in options.storms:
                fleet.storm(name)
            report["decisions"] = fleet.report
            report["served"] = fleet.serve()
    if options.histories:
        report["histories"] = histories(options.histories)
    report["bars"] = list(against_bars(report))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
