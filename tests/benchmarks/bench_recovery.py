"""How long a run pauses per fault, on simulated nodes of this machine.

Every time is read from what the run wrote: from the fault (our clock, just before the signal)
to the end of the first step of the next attempt (``wall_time`` of rank 0's metric line).

    python -m tests.benchmarks.bench_recovery --kills 20 --json
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import RunConfig, demo_config
from orchestrator.driver.cluster import open_cluster
from orchestrator.driver.faults import kill_node_of, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from tests.benchmarks.common import percentile, spread
from workers.telemetry import ABORTED, read_ring

ACT_S_MAX = 120.0
NUM_WORKERS = 4


class Bench:
    """One endless run of the small preset that is hurt again and again."""

    def __init__(self, config: RunConfig, cluster: Any) -> None:
        self.run = Launched(config, cluster)
        self._metrics = Path(config.run.directory) / "metrics/rank0.jsonl"
        self._hurt: Counter[str] = Counter()

    def victim(self, status: dict[str, Any], number: int) -> int:
        """Return the rank to hurt as the ``number``th: on the node that was hurt least so far.

        A node on which more workers fail than on the others is avoided for ten minutes.
        """
        members = (one for one in status["workers"] if one["rank"] >= 0)
        least = min(
            members, key=lambda x: (self._hurt[x["node"]], (x["rank"] - number) % NUM_WORKERS)
        )
        self._hurt[least["node"]] += 1
        return int(least["rank"])

    def lines(self) -> list[dict[str, Any]]:
        """Return the metric lines so far."""
        text = self._metrics.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def usual_steps_s(self) -> list[float]:
        """Return how long the last 256 steps took; those that began an attempt are left out."""
        pairs = itertools.pairwise(self.lines()[-257:])
        return [b["step_s"] for a, b in pairs if a["attempt"] == b["attempt"]]

    def settle(
        self, *, workers: int = NUM_WORKERS, standbys: int = 0, calm: bool = False, steps: int = 5
    ) -> dict[str, Any]:
        """Wait until ``workers`` train, ``standbys`` wait, and ``steps`` passed in between."""
        status = self._until(
            lambda s: (
                s["phase"] == "training"
                and not (calm and s["suspects"])
                and sum(w["rank"] >= 0 for w in s["workers"]) == workers
                and sum(w["state"] == "ready" for w in s["standbys"]) >= standbys
            )
        )
        goal = status["step"] + steps
        return self._until(lambda s: s["phase"] == "training" and s["step"] >= goal)

    def recovery(self, before: dict[str, Any], fault_s: float) -> dict[str, float]:
        """Return seconds from ``fault_s`` to the first step of a later attempt, and lost steps."""
        self._until(lambda s: s["attempt"] > before["attempt"] and s["step"] > 0)
        line: dict[str, Any] | None = None
        while line is None:
            line = next((x for x in self.lines() if x["attempt"] > before["attempt"]), None)
            time.sleep(0.01)
        old = max(x["step"] for x in self.lines() if x["attempt"] <= before["attempt"])
        return {"seconds": line["wall_time"] - fault_s, "lost_steps": old - line["step"] + 1}

    def _until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        status = wait_for(self.run, condition, timeout_s=ACT_S_MAX)
        assert status is not None, "the run ended during the benchmark"
        return status


def kill_workers(bench: Bench, count: int, *, standbys: int) -> list[dict[str, float]]:
    """SIGKILL one worker ``count`` times."""
    results = []
    for number in range(count):
        before = bench.settle(standbys=standbys)
        fault_s = time.time()
        signal_rank(bench.run, bench.victim(before, number), signal.SIGKILL)
        result = bench.recovery(before, fault_s)
        results.append({**result, "unblocked_s": unblocked_s(bench, before["attempt"])})
    return results


def stop_workers(bench: Bench, count: int) -> list[dict[str, Any]]:
    """SIGSTOP one worker ``count`` times; say whether the right one was named, and how soon.

    ``of_promised`` is the time over what was promised: max(1 s, 3 x p99 of a step) + 1 s.
    """
    results = []
    for number in range(count):
        before = bench.settle()
        promised_s = max(1.0, 3.0 * percentile(bench.usual_steps_s(), 0.99)) + 1.0
        fault_s = time.time()
        victim = signal_rank(bench.run, bench.victim(before, number), signal.SIGSTOP)
        result: dict[str, Any] = bench.recovery(before, fault_s)
        result["unblocked_s"] = unblocked_s(bench, before["attempt"])
        result["of_promised"] = result["seconds"] / promised_s
        status = bench.settle()
        guilty = (status["cause"] or {}).get("guilty", [])
        result["named_right"] = guilty == [victim["worker"]] or _was_named(bench, victim["worker"])
        results.append(result)
    return results


def unblocked_s(bench: Bench, attempt: int) -> float:
    """Return how long after the verdict the last wait ended that the fence of ``attempt`` ended.

    By the records of survivors, which are in a later attempt now. 0.0 if no rank waited by then:
    the connections of a dead peer end by themselves.
    """
    fenced_s: float = next(
        line["wall_time"]
        for line in journaled(bench)
        if line["kind"] == "FenceAttempt" and line["attempt"] == attempt
    )
    rings = map(read_ring, Path(bench.run.names.shared_root).rglob("*.ring.last"))
    calls = (one for ring in rings if ring.attempt == attempt for one in ring.records)
    ahead_s = time.time() - time.monotonic() - fenced_s
    ended_s = [one.exit_ns / 1e9 + ahead_s for one in calls if one.flags & ABORTED]
    return max([0.0, *ended_s])


def _was_named(bench: Bench, worker: str) -> bool:
    verdicts = [line for line in journaled(bench) if line["kind"] == "HangFound"]
    return bool(verdicts) and verdicts[-1]["guilty"] == [worker]


def journaled(bench: Bench) -> list[dict[str, Any]]:
    """Return the records of the run's journal so far."""
    journal = Path(bench.run.config.run.directory) / "journal"
    texts = [path.read_text() for path in sorted(journal.iterdir())]
    return [json.loads(x) for text in texts for x in text[: text.rfind("\n") + 1].splitlines()]


def lose_nodes(bench: Bench, count: int) -> tuple[list[dict[str, float]], list[float]]:
    """Kill a node and bring one back, ``count`` times; return recoveries and growth pauses."""
    recoveries, pauses = [], []
    for _ in range(count):
        before = bench.settle()
        fault_s = time.time()
        kill_node_of(bench.run, NUM_WORKERS - 1)
        recoveries.append(bench.recovery(before, fault_s))
        bench.settle(workers=NUM_WORKERS // 2)
        assert bench.run.cluster is not None
        bench.run.cluster.add_node()
        bench.settle()
        pauses.append(_growth_pause(bench.lines()))
    return recoveries, pauses


def _growth_pause(lines: list[dict[str, Any]]) -> float:
    """Return how much longer than a step the incumbents stood still at the last growth."""
    grown = max(
        i for i in range(1, len(lines)) if lines[i]["num_workers"] > lines[i - 1]["num_workers"]
    )
    gap_s = lines[grown]["wall_time"] - lines[grown - 1]["wall_time"]
    return float(gap_s - lines[grown - 1]["step_s"])


def kill_controller(bench: Bench, count: int) -> list[dict[str, float]]:
    """SIGKILL the controller; return when it was back and the longest gap between steps.

    It is back once it has found every worker again, and not when it answers: it does so before.
    """
    results = []
    for _ in range(count):
        before = bench.settle()
        pid = bench.run.controller_pid()
        fault_s = time.time()
        os.kill(pid, signal.SIGKILL)
        found: list[float] = []
        while not found:
            assert time.time() - fault_s < ACT_S_MAX, "the controller is not back in charge"
            time.sleep(0.1)
            surveys = (x for x in journaled(bench) if x["kind"] == "WorkersSurveyed")
            found = [x["wall_time"] for x in surveys if x["wall_time"] > fault_s]
        back_s = found[0] - fault_s
        bench.settle()
        times = [line["wall_time"] for line in bench.lines() if line["wall_time"] >= fault_s - 1]
        gap_s = max(b - a for a, b in itertools.pairwise(times))
        same = all(x["attempt"] == before["attempt"] for x in bench.lines()[-3:])
        results.append({"seconds": back_s, "gap_s": gap_s, "same_attempt": float(same)})
    return results


@contextlib.contextmanager
def running(*, standby_per_node: int, more: Sequence[str] = ()) -> Iterator[Bench]:
    """Bring up nodes and an endless run, with ``more`` settings; take all down at the end."""
    directory = tempfile.mkdtemp(prefix="everstep-bench-")
    settings = [
        "train.steps=1000000", "train.schedule=constant", "train.deterministic=false",
        f"workers.max={NUM_WORKERS}", f"workers.standby_per_node={standby_per_node}",
        "recovery.infrastructure_failures_max=100000", *more,
    ]  # fmt: skip
    config = demo_config(str(Path(directory) / "run"), settings)
    cluster = open_cluster(config)
    assert cluster is not None
    try:
        yield Bench(config, cluster)
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shrinks", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    _say("warm standbys: kills, stops, controller")
    with running(standby_per_node=1) as bench:
        steps = [line["step_s"] for line in _after_settling(bench)]
        result["step"] = spread(steps)
        result["kill_standby"] = _spread(kill_workers(bench, arguments.kills, standbys=2))
        _say(json.dumps(result))
        stops = stop_workers(bench, arguments.kills)
        result["stop"] = {**_spread(stops), "named": sum(s["named_right"] for s in stops)}
        result["stop_of_promised"] = spread([stop["of_promised"] for stop in stops])
        _say(json.dumps(result))
        controller = kill_controller(bench, arguments.nodes)
        result["controller"] = {**_spread(controller), "gap_s": max(c["gap_s"] for c in controller)}
    _say(json.dumps(result))
    with running(standby_per_node=0) as bench:
        losses, pauses = lose_nodes(bench, arguments.nodes)
        result["node"] = _spread(losses)
        result["growth_pause"] = spread(pauses)
        _say(json.dumps(result))
        result["kill_shrink"] = _spread(kill_workers(bench, arguments.shrinks, standbys=0))
    _say(json.dumps(result))
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


def _say(text: str) -> None:
    """Show progress, and what is known so far, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def _after_settling(bench: Bench) -> list[dict[str, Any]]:
    bench.settle()
    bench.settle()
    return bench.lines()[-8:]


def _spread(results: list[dict[str, Any]]) -> dict[str, Any]:
    lost = [result["lost_steps"] for result in results if "lost_steps" in result]
    unblocked_s = [result["unblocked_s"] for result in results if "unblocked_s" in result]
    more: dict[str, Any] = {"lost_max": max(lost)} if lost else {}
    if unblocked_s:
        more["unblocked_s"] = spread(unblocked_s)
    return {**spread([r["seconds"] for r in results]), **more}


if __name__ == "__main__":
    main()
