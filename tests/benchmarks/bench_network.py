"""Measures a run on a real Ray cluster under faults of the network, of machines and of the head.

    python -m tests.benchmarks network                       # each row once
    python -m tests.benchmarks network --only pair deaf --repeat 10 --hold 180
    python -m tests.benchmarks network --json

A head without workers and four nodes with one worker each, every one a machine made of Linux
namespaces (``tests.support.network_cluster``), with the health checks that Ray comes with; storage
is shared and never cut. The run is begun by ``everstep run``. A step takes 0.2, 10 or 60 s with
four workers and hardly any processor time. A machine whose Ray ended starts it again, as it would
under systemd or Kubernetes. Every time is read from what the run wrote and counts from the fault;
``since_sent_s`` from the first bytes that a cut swallowed.

Needs root, and ``ip`` and ``tc`` of iproute2.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.benchmarks.common import load_average, spread
from tests.support.network_cluster import HEAD, NetworkCluster, why_not
from tests.support.network_runs import NetworkRun
from workers.telemetry.lease import VARIABLE

WORKERS = 4
#: The provider takes a machine back so long after it said so.
NOTICE_S = 30.0
#: A link is down for so long, every ``FLAP_S``.
DOWN_S, FLAP_S = 5.0, 20.0
#: So long two runs are watched side by side.
SIDE_BY_SIDE_S = 40.0
#: A head that comes back is away for so long.
AWAY_S = 20.0
#: Trainers without a head are watched for so long at most.
ORPHANS_S_MAX = 180.0

Row: TypeAlias = Callable[["Scene"], dict[str, Any]]


@dataclass(kw_only=True)
class Scene:
    """Where rows are played. Those that leave a run whole leave it to the next one."""

    folder: Path  #: For run directories.
    repeat: int  #: How many faults of a kind.
    hold_s: float  #: How long a fault of the network lasts.
    flap_s: float  #: How long a link flaps.
    pace_s: float = 0.2  #: How long a step takes with all workers.
    _held: ExitStack = field(default_factory=ExitStack)
    _run: NetworkRun | None = None

    def directory(self) -> Path:
        """Return a new run directory."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "run"

    def shared(self) -> NetworkRun:
        """Return an endless run on a cluster that is whole, or soon will be."""
        if self._run is None:
            self._run = self._held.enter_context(self.own())
        return self._run

    def close(self) -> None:
        """End the shared run and its cluster; the next row gets others."""
        self._held.close()
        self._run = None

    @contextmanager
    def own(self, num_nodes: int = WORKERS, *, has_metadata: bool = False) -> Iterator[NetworkRun]:
        """Bring up a cluster and an endless run for one row alone."""
        with NetworkCluster(num_nodes) as cluster:
            directory = self.directory()
            yield NetworkRun(cluster, directory, pace_s=self.pace_s, has_metadata=has_metadata)

    def settle(self, run: NetworkRun, workers: int = WORKERS) -> dict[str, Any]:
        """Wait until ``workers`` train together; return their last line."""
        return run.settle(workers, steps=5 if self.pace_s < 1.0 else 2)


def network_fault(
    scene: Scene,
    *,
    begin: Callable[[NetworkCluster, int], None],
    end: Callable[[NetworkCluster, int], None],
) -> dict[str, Any]:
    """Hurt the machine of the last rank, undo it after a while; again and again."""
    found = []
    run = scene.shared()
    for _ in range(scene.repeat):
        line = scene.settle(run)
        victim = run.ranks()[-1]
        fault_s = time.time()
        begin(run.cluster, victim)
        outcome = run.outcome(fault_s, line["attempt"])
        found.append({**asdict(outcome), "right": outcome.named == (victim,)})
        if scene.pace_s < 1.0 or len(found) < scene.repeat:
            time.sleep(max(0.0, fault_s + scene.hold_s - time.time()))
            healed_s = time.time()
            end(run.cluster, victim)
            found[-1]["whole"] = run.whole_again(healed_s)
        _say(json.dumps(found[-1]))
    if "whole" not in found[-1]:
        scene.close()  # with long steps it takes minutes to be whole
    return _together(found)


def pair(scene: Scene) -> dict[str, Any]:
    """Cut two machines from one another; both reach all others."""
    found = []
    for _ in range(scene.repeat):
        run = scene.shared()
        line = scene.settle(run)
        one, other = run.ranks()[1:3]
        fault_s = time.time()
        run.cluster.cut(one, other)
        try:
            outcome = asdict(run.outcome(fault_s, line["attempt"], scene.hold_s + 4 * scene.pace_s))
        except TimeoutError:
            outcome = {"step_s": None, "why": f"no step while it was cut, {scene.hold_s:.0f} s"}
        whole_s = None
        if scene.pace_s < 1.0:
            time.sleep(max(0.0, fault_s + scene.hold_s - time.time()))
            healed_s = time.time()
            run.cluster.mend(one, other)
            whole_s = run.whole_again(healed_s)
        else:
            scene.close()  # with long steps it takes minutes to be whole
        if outcome["step_s"] is not None:
            # A cut shows when something is sent: here, gradients at the end of a step.
            sent_s = max(0.0, line["wall_time"] + line["step_s"] - fault_s)
            outcome["since_sent_s"] = round(outcome["detected_s"] - sent_s, 2)
        right = outcome["step_s"] is not None and set(outcome["named"]) <= {one, other}
        found.append({**outcome, "right": right, "whole": whole_s})
        _say(json.dumps(found[-1]))
    return _together(found)


def drain(scene: Scene) -> dict[str, Any]:
    """Give notice of a machine's end, and end it then."""
    run = scene.shared()
    line = scene.settle(run)
    victim = run.ranks()[-1]
    node = next(n for n, each in reversed(run.cluster.nodes().items()) if each == victim)
    fault_s = time.time()
    run.cluster.run(HEAD, [
        "ray", "drain-node", "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message", "spot", "--deadline-remaining-seconds", f"{NOTICE_S:.0f}",
    ])  # fmt: skip
    return _taken(run, victim, fault_s, line["attempt"])


def _taken(run: NetworkRun, victim: int, told_s: float, attempt: int) -> dict[str, Any]:
    """End a machine at the end of its notice, and boot it again; return what came of it."""
    outcome = run.outcome(told_s, attempt)
    pause_s = _longest_gap(run, told_s) - run.lines()[-1]["step_s"]
    time.sleep(max(0.0, told_s + NOTICE_S - time.time()))
    run.cluster.kill(victim)
    after = run.lines()[-1]
    run.wait("ten more steps", lambda: run.lines()[-1]["step"] >= after["step"] + 10 or None)
    unmoved = run.lines()[-1]["attempt"] == after["attempt"]
    # The next machine at its address is another one.
    run.announce(victim, None)
    back_s = time.time()
    run.cluster.boot(victim)
    return {
        **asdict(outcome), "pause_s": round(pause_s, 2), "right": unmoved,
        "whole": run.whole_again(back_s),
    }  # fmt: skip


def notice(scene: Scene) -> dict[str, Any]:
    """Let a machine's metadata service say when it is taken, and end it then; again and again."""
    found = []
    with scene.own(has_metadata=True) as run:
        for _ in range(scene.repeat):
            line = scene.settle(run)
            victim = run.ranks()[-1]
            told_s = time.time()
            run.announce(victim, told_s + NOTICE_S)
            found.append(_taken(run, victim, told_s, line["attempt"]))
            _say(json.dumps(found[-1]))
    return _together(found)


def join(scene: Scene) -> dict[str, Any]:
    """Let a machine join a run that trains without it."""
    with scene.own(num_nodes=WORKERS - 1) as run:
        scene.settle(run, WORKERS - 1)
        fault_s = time.time()
        run.cluster.boot(WORKERS)
        whole_s = run.whole_again(fault_s)
        pause_s = _longest_gap(run, fault_s) - run.lines()[-1]["step_s"]
        return {"pause_s": round(pause_s, 2), "whole": whole_s, "lost_steps": 0, "right": True}


def _longest_gap(run: NetworkRun, since_s: float) -> float:
    times = [line["wall_time"] for line in run.lines() if line["wall_time"] > since_s - 5.0]
    return float(max(b - a for a, b in itertools.pairwise(times)))


def head_killed(scene: Scene) -> dict[str, Any]:
    """End the head for good: what becomes of the trainers that it leaves behind?"""
    with scene.own() as run:
        scene.settle(run)
        fault_s = time.time()
        run.cluster.kill(HEAD)
        ended_s = _await_orphans(run, fault_s)
        last = run.lines()[-1]
        stored = _stored(run.directory)
        return {
            "trained_on_s": round(last["wall_time"] - fault_s, 1), "ended_s": ended_s,
            "last_step": last["step"], "stored": stored, "lost_steps": last["step"] - stored,
            "right": True,
        }  # fmt: skip


def _await_orphans(run: NetworkRun, fault_s: float) -> float | None:
    """Return after how many seconds all machines stopped making steps; None if they still do."""
    while time.time() < fault_s + ORPHANS_S_MAX:
        if time.time() - max(fault_s, run.lines()[-1]["wall_time"]) > 20.0:
            return round(float(run.lines()[-1]["wall_time"]) - fault_s, 1)
        time.sleep(1.0)
    return None


def head_rebooted(scene: Scene) -> dict[str, Any]:
    """End the head, boot it again at the same address, and begin the run again."""
    with scene.own() as run:
        before = scene.settle(run)
        fault_s = time.time()
        run.cluster.kill(HEAD)
        run.cluster.boot(HEAD)
        run.cluster.await_ray(HEAD)
        again = NetworkRun(run.cluster, run.directory, pace_s=scene.pace_s)
        return _resumed(again, fault_s, before)


def head_back(scene: Scene) -> dict[str, Any]:
    """End the head and boot it again while a Redis keeps what it knew; then stop the run.

    Ray's own processes on the head need two processors for two seconds to start, and trainers wait
    for those where they share them. No user's head shares them.
    """
    waits = {VARIABLE: "600"}  # as KubeRay has it
    with NetworkCluster(WORKERS, has_redis=True, head_yields=True, environment=waits) as cluster:
        run = NetworkRun(cluster, scene.directory(), pace_s=scene.pace_s, on=1)
        found = [_came_back(scene, run) for _ in range(scene.repeat)]
        began_s = time.monotonic()
        outcome = run.stop()["outcome"]
        stop_s = round(time.monotonic() - began_s, 1)
        result = _together(found)
        return {**result, "stop_s": stop_s, "right": result["right"] and outcome == "stopped"}


def _came_back(scene: Scene, run: NetworkRun) -> dict[str, Any]:
    before = scene.settle(run)
    fault_s = time.time()
    run.cluster.kill(HEAD)
    time.sleep(AWAY_S)
    run.cluster.boot(HEAD)
    run.cluster.await_ray(HEAD)
    surveyed_s = run.wait("a controller in charge", lambda: _surveyed_s(run, fault_s))
    last = run.lines()[-1]
    run.wait("ten more steps", lambda: run.lines()[-1]["step"] >= last["step"] + 10 or None)
    gap_s = _longest_gap(run, fault_s)
    steps = [line["step"] for line in run.lines()]
    found = {
        "in_charge_s": round(surveyed_s - fault_s, 1), "gap_s": round(gap_s, 2),
        "gap_steps": round(gap_s / before["step_s"], 1), "lost_steps": len(steps) - len(set(steps)),
        "right": run.lines()[-1]["attempt"] == before["attempt"],
    }  # fmt: skip
    _say(json.dumps(found))
    return found


def _surveyed_s(run: NetworkRun, since_s: float) -> float | None:
    """Return when a controller that began after ``since_s`` knew who lives; None before."""
    times = [r["wall_time"] for r in run.journal() if r["kind"] == "WorkersSurveyed"]
    return next((each for each in times if each > since_s), None)


def second_cluster(scene: Scene) -> dict[str, Any]:
    """End the head and begin the run on another cluster, while the old trainers live."""
    with NetworkCluster(WORKERS, number=1) as other, scene.own() as run:
        before = scene.settle(run)
        # Some checkpoints, of which retention has deleted the first ones.
        run.wait("checkpoints", lambda: run.lines()[-1]["step"] >= 60 or None)
        before = run.lines()[-1]
        fault_s = time.time()
        run.cluster.kill(HEAD)
        again = NetworkRun(other, run.directory, pace_s=scene.pace_s)
        found = _resumed(again, fault_s, before)
        started_s = time.time()
        time.sleep(20.0)
        late = [
            x for x in again.lines()
            if x["wall_time"] > started_s and x["attempt"] <= before["attempt"]
        ]  # fmt: skip
        return {**found, "late_steps_of_the_old": len(late)}


def _resumed(run: NetworkRun, fault_s: float, before: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a run that was begun again in the directory of an older claim."""
    stored = _stored(run.directory)
    line = run.first(lambda x: x["attempt"] > before["attempt"], ORPHANS_S_MAX)
    old = max(x["step"] for x in run.lines() if x["attempt"] <= before["attempt"])
    resumed = line["step"] - 1
    return {
        "step_s": round(line["wall_time"] - fault_s, 1), "stored": stored, "resumed": resumed,
        "lost_steps": old - resumed, "right": resumed >= stored,
        "whole": round(run.whole_again(fault_s), 1) if line["num_workers"] < WORKERS else 0.0,
    }  # fmt: skip


def _stored(directory: Path) -> int:
    """Return the newest step in storage."""
    manifests = directory.glob("checkpoints/*/manifest.json")
    return max((int(path.parent.name.rsplit("-", 1)[1]) for path in manifests), default=0)


def flapping(scene: Scene) -> dict[str, Any]:
    """Let the link of a machine fail again and again."""
    run = scene.shared()
    scene.settle(run)
    victim = run.ranks()[-1]
    begun_s = time.time()
    while time.time() < begun_s + scene.flap_s:
        run.cluster.partition(victim)
        time.sleep(DOWN_S)
        run.cluster.heal(victim)
        time.sleep(FLAP_S - DOWN_S)
    ended_s = time.time()
    steps = {
        x["step"]: x["step_s"] for x in run.lines() if begun_s < x["wall_time"] < ended_s
    }  # fmt: skip
    incidents = [r for r in run.journal() if r["kind"] == "ReportIncident"]
    named = run.machines_of(worker for each in incidents for worker in each["guilty"])
    return {
        "goodput": round(sum(steps.values()) / (ended_s - begun_s), 3),
        "incidents": len(incidents), "named": named, "right": set(named) <= {victim},
        "whole": run.whole_again(ended_s),
    }  # fmt: skip


def two_runs(scene: Scene) -> dict[str, Any]:
    """Train twice on the same machines, side by side."""
    with NetworkCluster(WORKERS, cpus_per_node=2) as cluster:
        runs = [NetworkRun(cluster, scene.directory(), pace_s=scene.pace_s) for _ in range(2)]
        begun = [scene.settle(run)["step"] for run in runs]
        time.sleep(SIDE_BY_SIDE_S)
        steps = [run.lines()[-1]["step"] - step for run, step in zip(runs, begun, strict=True)]
        faults = [r for run in runs for r in run.journal() if r["kind"] == "ReportIncident"]
        planned = {"growth"}
        unplanned = [r["incident"] for r in faults if r["incident"] not in planned]
        return {"steps": steps, "incidents": len(unplanned), "right": not unplanned}


def _fault(name: str, undo: str = "heal") -> Row:
    return partial(
        network_fault,
        begin=lambda cluster, victim: getattr(cluster, name)(victim),
        end=lambda cluster, victim: getattr(cluster, undo)(victim),
    )


ROWS: Final[dict[str, tuple[str, Row]]] = {
    "partition": ("node partitioned", _fault("partition")),
    "power-off": ("power-off without a word", _fault("power_off", "boot")),
    "deaf": ("one way: a node cannot hear", _fault("deafen")),
    "mute": ("one way: a node cannot speak", _fault("silence")),
    "pair": ("one pair cut", pair),
    "pair-10s": ("one pair cut, steps of 10 s", pair),
    "pair-60s": ("one pair cut, steps of 60 s", pair),
    "partition-10s": ("node partitioned, steps of 10 s", _fault("partition")),
    "power-off-10s": ("power-off, steps of 10 s", _fault("power_off", "boot")),
    "deaf-10s": ("cannot hear, steps of 10 s", _fault("deafen")),
    "mute-10s": ("cannot speak, steps of 10 s", _fault("silence")),
    "drain": (f"drained with {NOTICE_S:.0f} s of notice", drain),
    "notice": (f"taken {NOTICE_S:.0f} s after the metadata service said so", notice),
    "join": ("node joins", join),
    "head-killed": ("head killed for good", head_killed),
    "head-rebooted": ("head booted again, run again", head_rebooted),
    "head-back": (f"head away for {AWAY_S:.0f} s, its state kept in Redis", head_back),
    "second-cluster": ("head killed, same directory on a second cluster", second_cluster),
    "flapping": (f"link down {DOWN_S:.0f} s every {FLAP_S:.0f} s", flapping),
    "two-runs": ("two runs on the same nodes", two_runs),
}


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result of several faults: medians and maxima of times, sums of the rest."""
    if len(found) == 1:
        return found[0]
    result: dict[str, Any] = {"right": all(each["right"] for each in found), "faults": found}
    for name in (
        "detected_s",
        "step_s",
        "resumed_s",
        "pause_s",
        "whole",
        "in_charge_s",
        "gap_s",
        "gap_steps",
    ):
        values = [each[name] for each in found if each.get(name) is not None]
        if values:
            result[name] = spread(values)["p50"]
            result[f"{name}_max"] = max(values)
    result["lost_steps"] = max(each.get("lost_steps", 0) for each in found)
    return result


def main() -> int:
    """Play rows and print what came of them; return 1 if a run did not survive one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeat", type=int, default=1, help="faults of each kind of the network")
    parser.add_argument("--hold", type=float, default=40.0, help="seconds that a fault lasts")
    parser.add_argument("--flap", type=float, default=120.0, help="seconds that a link flaps")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder,
        closing(
            Scene(
                folder=Path(folder),
                repeat=arguments.repeat,
                hold_s=arguments.hold,
                flap_s=arguments.flap,
            )
        ) as scene,
    ):
        for name in arguments.only:
            _say(f"{name}: {ROWS[name][0]} ...")
            results[name] = _played(name, scene)
            _say(f"{name}: {json.dumps(results[name])}")
    print(json.dumps(results) if arguments.json else _table(results))
    return 0 if all(result["right"] for result in results.values()) else 1


def _played(name: str, scene: Scene) -> dict[str, Any]:
    pace_s = next((each for each in (10.0, 60.0) if name.endswith(f"-{each:.0f}s")), 0.2)
    if pace_s != scene.pace_s:
        scene.close()
    scene.pace_s = pace_s
    try:
        result = ROWS[name][1](scene)
    except (TimeoutError, OSError) as error:
        scene.close()  # with all that was not undone
        result = {"right": False, "why": str(error)}
    return {**result, "load": load_average()[0]}


def _table(results: dict[str, Any]) -> str:
    columns = ("detected_s", "resumed_s", "step_s", "lost_steps", "named", "right", "whole")
    head = ["fault", "found", "resumed", "step", "lost", "named", "right", "whole again", "other"]
    lines = [head, ["---"] * len(head)]
    for name, result in results.items():
        known = (
            *columns,
            "load",
            "evidence",
            "faults",
            "why",
            *(f"{each}_max" for each in columns),
        )
        other = [f"{key} {value}" for key, value in result.items() if key not in known]
        why = [result["why"].splitlines()[0]] if "why" in result else []
        cells = [_cell(result.get(column)) for column in columns]
        lines.append([ROWS[name][0], *cells, ", ".join(other + why)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _say(text: str) -> None:
    """Show progress, apart from the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
