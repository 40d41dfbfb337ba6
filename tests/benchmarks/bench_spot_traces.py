"""How much of the spot market's nodes a run uses: real traces, real Ray nodes, an hour a minute.

    python -m tests.benchmarks spot_traces --trace p3 --hours 0 4

Up to eight simulated nodes of this machine, with a worker each, come and go as in the trace: a node
is a raylet, and to take it is to kill it. ``--notice-s`` has Ray drain a node so long before (AWS
gives 120 s, GCP 30 s; it is compressed like all else); 0 takes nodes without a word. Steps take
0.5 s with eight workers and wait most of that time, so that processors are not what is measured.

Goodput is the work of the steps that count over what the nodes could have done at most: each node
counts from its arrival until it is taken, at the pace of a micro-batch, of which each makes a whole
number a step. Missing costs are listed, as a share of all: workers that start, members that stand
still, steps that were redone, and what a step takes beyond the pace.

Beside it the same piece of the trace is computed for Ray Train, which restarts from a checkpoint,
with times that ``RESULTS.md`` has, and for everstep with the times of this run, to tell how far
arithmetic can be trusted. ``--computed`` prints that alone: whole traces, also at their own pace.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from orchestrator.config import demo_config
from orchestrator.shell import HostedCluster, RunNames, connect_ray, run_id
from orchestrator.shell.local.cluster import HEAD_ENVIRONMENT
from tests.benchmarks.bench_recovery import ACT_S_MAX, Bench, journaled
from tests.benchmarks.common import load_average, spread
from tests.support import train_paced
from tests.support.spot_traces import TRACES, Change, Costs, piece, replayed, scaled, spot_trace

NUM_NODES = 8
#: An hour takes a minute.
SPEEDUP = 60.0
#: The steps of ``train_paced`` with four workers; with eight they take half as long.
PACE_S = 1.0
#: 7 for each of eight workers. More would divide better by five and six, and each needs 2 to 3 ms
#: of a processor.
MICRO_BATCHES = 56
SHARE_S = PACE_S * 4 / MICRO_BATCHES
#: Ray Train 2.60 with short timeouts (``RESULTS.md``, Beside peers): a lost node, and a restart of
#: the workers, which is what it does to grow. It looks for new nodes every 60 s.
PEERS = {"ray_train": Costs(loss=27.2, growth=12.3, interval=60.0)}
#: everstep on an idle machine (``RESULTS.md``): a lost node, a growth, and the start of a worker.
IDLE = Costs(loss=0.8, growth=0.3, join=8.0)


@dataclass
class Nodes:
    """The nodes of a cluster, and when each was there."""

    cluster: Any
    #: Wall clock of arrival and end of each that came; infinity while it is there.
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        now_s = time.time()
        self.lives = {node: (now_s, float("inf")) for node in self.cluster.nodes()}

    def add(self, count: int) -> None:
        for _ in range(count):
            node = self.cluster.add_node()
            self.lives[node] = (time.time(), float("inf"))

    def tell(self, count: int, notice_s: float) -> None:
        """Choose the nodes that are taken in ``notice_s``, and have Ray drain them."""
        free = sorted(set(self.cluster.nodes()) - set(self.told))
        chosen = self._draw.sample(free, min(count, len(free)))
        self.told += chosen
        if notice_s:
            client = GcsClient(address=self.cluster.address)
            reason = autoscaler_pb2.DrainNodeReason.Value(  # type: ignore[attr-defined]
                "DRAIN_NODE_REASON_PREEMPTION"
            )
            end_ms = int((time.time() + notice_s) * 1000)
            for node in chosen:
                client.drain_node(node, reason, "spot", end_ms)

    def take(self, count: int) -> None:
        """Take the nodes that were chosen first."""
        for _ in range(min(count, len(self.told))):
            node = self.told.pop(0)
            self.cluster.kill_node(node)
            self.lives[node] = (self.lives[node][0], time.time())


def orders(changes: Sequence[Change], notice_s: float) -> list[tuple[float, str, int]]:
    """Return what to do when: tell and take before add, where they come together."""
    found = []
    for before, after in pairwise(changes):
        count = after.num_nodes - before.num_nodes
        if count > 0:
            found.append((after.at, "add", count))
        else:
            found.append((after.at - notice_s, "tell", -count))
            found.append((after.at, "take", -count))
    return sorted(found, key=lambda order: (order[0], ("tell", "take", "add").index(order[1])))


def play(nodes: Nodes, changes: Sequence[Change], end_s: float, notice_s: float) -> float:
    """Have nodes come and go; return by how much the latest order was late."""
    begun_s, latest_s = time.time(), 0.0
    for at_s, kind, count in orders(changes, notice_s):
        time.sleep(max(0.0, begun_s + at_s - time.time()))
        latest_s = max(latest_s, time.time() - begun_s - at_s)
        if kind == "add":
            nodes.add(count)
        elif kind == "tell":
            nodes.tell(count, notice_s)
        else:
            nodes.take(count)
    time.sleep(max(0.0, begun_s + end_s - time.time()))
    return latest_s


def overlap(begin: float, end: float, window: tuple[float, float]) -> float:
    """Return how much of ``window`` is between two times."""
    return max(0.0, min(end, window[1]) - max(begin, window[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some time of a run: a step, with what came before it in its attempt, or a pause."""

    begin_s: float
    end_s: float
    num_members: int
    kind: str


def stretches(lines: Sequence[dict[str, Any]]) -> Iterator[Stretch]:
    """Cut a run's metric lines into stretches: ``step``, ``redone`` or ``pause``."""
    last = {line["step"]: number for number, line in enumerate(lines)}
    for number, (before, line) in enumerate(pairwise(lines), start=1):
        begin_s, end_s = before["wall_time"], line["wall_time"]
        if before["attempt"] != line["attempt"]:
            step_s = end_s - line["step_s"]
            yield Stretch(
                begin_s=begin_s, end_s=step_s, num_members=line["num_workers"], kind="pause"
            )
            begin_s = step_s
        kind = "step" if last[line["step"]] == number else "redone"
        yield Stretch(begin_s=begin_s, end_s=end_s, num_members=line["num_workers"], kind=kind)


def useful(num_nodes: int) -> float:
    """Return how many nodes' worth of work so many can do: a micro-batch is not divided."""
    return MICRO_BATCHES / -(-MICRO_BATCHES // num_nodes) if num_nodes else 0.0


def useful_s(lives: Sequence[tuple[float, float]], window: tuple[float, float]) -> float:
    """Return ``useful`` of the nodes that are there, summed over the seconds of a window."""
    times = sorted({*window, *(t for life in lives for t in life if window[0] < t < window[1])})
    return sum(
        useful(sum(life[0] <= begin < life[1] for life in lives)) * (end - begin)
        for begin, end in pairwise(times)
    )


def account(
    lines: Sequence[dict[str, Any]],
    lives: Sequence[tuple[float, float]],
    window: tuple[float, float],
) -> dict[str, float]:
    """Return goodput, and where the rest of the nodes' time went, as shares of it."""
    lost = dict.fromkeys(("workers_start", "pauses", "redone", "beyond_pace"), 0.0)
    work_s = 0.0
    for each in stretches(lines):
        begin_s, end_s = max(each.begin_s, window[0]), min(each.end_s, window[1])
        if begin_s >= end_s:
            continue
        could_s = useful_s(lives, (begin_s, end_s))
        if each.kind == "pause":
            lost["pauses"] += could_s
            continue
        members_s = min(useful(each.num_members) * (end_s - begin_s), could_s)
        lost["workers_start"] += could_s - members_s
        if each.kind == "redone":
            lost["redone"] += members_s
            continue
        done_s = (end_s - begin_s) / (each.end_s - each.begin_s) * MICRO_BATCHES * SHARE_S
        work_s += done_s
        lost["beyond_pace"] += members_s - done_s
    all_s = useful_s(lives, window)
    return {
        "goodput": round(work_s / all_s, 4),
        **{what: round(seconds / all_s, 4) for what, seconds in lost.items()},
    }


def pauses(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return how long the members stood still when some left, and when some came."""
    found: dict[str, list[float]] = {"loss": [], "growth": []}
    for before, line in pairwise(lines):
        if before["attempt"] != line["attempt"]:
            kind = "growth" if line["num_workers"] > before["num_workers"] else "loss"
            found[kind].append(line["wall_time"] - line["step_s"] - before["wall_time"])
    return found


def redone(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many steps each attempt made again, of those that did."""
    lost = [
        before["step"] - line["step"] + 1
        for before, line in pairwise(lines)
        if before["attempt"] != line["attempt"]
    ]
    return [count for count in lost if count > 0]


def starts(
    journal: Sequence[dict[str, Any]],
    lives: Mapping[str, tuple[float, float]],
    window: tuple[float, float],
) -> list[float]:
    """Return how long after its arrival each newcomer's worker was ready, of those that got it."""
    ready: dict[str, float] = {}
    for record in journal:
        if record["kind"] == "WorkerReady":
            ready.setdefault(record["node"], record["wall_time"])
    return [
        ready[node] - begin
        for node, (begin, _) in lives.items()
        if node in ready and window[0] < begin
    ]


@contextlib.contextmanager
def running(num_nodes: int) -> Iterator[tuple[Bench, Nodes]]:
    """Bring up nodes and an endless paced run; take all down at the end."""
    directory = tempfile.mkdtemp(prefix="everstep-bench-")
    settings = [
        f"run.script={train_paced.__file__}", f"run.arguments=['{PACE_S}']",
        "train.steps=1000000", "train.schedule=constant", "train.deterministic=false",
        f"train.global_batch={MICRO_BATCHES}", "train.micro_batch=1",
        f"workers.max={NUM_NODES}", "workers.standby_per_node=0",
        "snapshot.tolerance=2",  # half of the losses in p3 take two nodes or more
    ]  # fmt: skip
    config = demo_config(str(Path(directory) / "run"), settings)
    # With Ray's usual 15 they would wait behind every other process of the machine.
    os.environ.update(HEAD_ENVIRONMENT)
    cluster = HostedCluster(num_nodes=num_nodes, cpus_per_node=1)
    try:
        namespace = RunNames(run_id(config.run.directory)).namespace
        connect_ray(cluster.address, namespace=namespace)
        yield Bench(config, cluster), Nodes(cluster)
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def in_seconds(changes: Sequence[Change], speedup: float) -> list[Change]:
    """Return a trace of hours in seconds, ``speedup`` times as fast."""
    return [Change(change.at * 3600.0 / speedup, change.num_nodes) for change in changes]


def measure(name: str, hours: tuple[float, float], notice_s: float) -> dict[str, Any]:
    """Play a piece of a trace to a run; return its goodput, and that of peers by arithmetic."""
    trace = scaled(spot_trace(name), NUM_NODES)
    hours = max(hours[0], trace[0].at), hours[1]
    fast = in_seconds(piece(trace, *hours), SPEEDUP)
    end_s = (hours[1] - hours[0]) * 3600.0 / SPEEDUP
    with running(fast[0].num_nodes) as (bench, nodes):
        bench.settle(workers=fast[0].num_nodes)
        calm_s = statistics.median(line["step_s"] for line in bench.lines()[-5:])
        begun_s = time.time()
        late_s = play(nodes, fast, end_s, notice_s / SPEEDUP)
        window = (begun_s, time.time())
        while bench.lines()[-1]["wall_time"] < window[1]:
            assert bench.run.summary() is None, "the run ended"
            assert time.time() < window[1] + ACT_S_MAX, "the run makes no more steps"
            time.sleep(0.1)
        lines, journal = bench.lines(), journaled(bench)
    lives = list(nodes.lives.values())
    inside = [line for line in lines if window[0] <= line["wall_time"] <= window[1]]
    stood = pauses(inside)
    ready_s = starts(journal, nodes.lives, window)
    policies = {
        **PEERS,
        "everstep": Costs(
            loss=median(stood["loss"]), growth=median(stood["growth"]), join=median(ready_s)
        ),
    }
    return {
        "trace": name, "hours": hours, "notice_s": notice_s,
        **account(lines, lives, window),
        "nodes_lost": sum(end < window[1] for _, end in lives),
        "nodes_come": sum(window[0] < begin for begin, _ in lives),
        "stood_still": {kind: spread(seconds) for kind, seconds in stood.items() if seconds},
        "steps_redone": redone(inside),
        "incidents": Counter(
            record["incident"] for record in journal
            if record["kind"] == "ReportIncident" and record["wall_time"] > window[0]
        ),
        "until_ready": spread(ready_s) if ready_s else None,
        "calm_beyond_pace": round(calm_s / (-(-MICRO_BATCHES // fast[0].num_nodes) * SHARE_S), 3),
        "computed": {
            policy: round(replayed(fast, end_s, costs), 3) for policy, costs in policies.items()
        },
        "late_s": round(late_s, 2), "load": load_average(),
    }  # fmt: skip


def computed(name: str) -> dict[str, Any]:
    """Return what policies make of a whole trace, compressed and not."""
    trace = scaled(spot_trace(name), NUM_NODES)
    begin, end = trace[0].at, trace[-1].at
    found: dict[str, Any] = {"trace": name}
    for what, speedup in (("compressed", SPEEDUP), ("own_pace", 1.0)):
        changes = in_seconds(piece(trace, begin, end), speedup)
        end_s = (end - begin) * 3600.0 / speedup
        policies = {**PEERS, "everstep": IDLE}
        found[what] = {
            policy: round(replayed(changes, end_s, costs), 4) for policy, costs in policies.items()
        }
    return found


def median(values: Sequence[float]) -> float:
    """Return the median, 0.0 of nothing."""
    return statistics.median(values) if values else 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", choices=TRACES, nargs="+", default=list(TRACES))
    parser.add_argument("--hours", type=float, nargs=2, default=(0.0, 4.0))
    parser.add_argument("--notice-s", type=float, default=0.0, help="of the trace's time")
    parser.add_argument("--computed", action="store_true", help="start nothing")
    arguments = parser.parse_args()
    for name in arguments.trace:
        if arguments.computed:
            print(json.dumps(computed(name)), flush=True)
            continue
        print(json.dumps(measure(name, tuple(arguments.hours), arguments.notice_s)), flush=True)


if __name__ == "__main__":
    main()
