"""Real runs of four workers on one device: killed, stopped, compared with undisturbed ones."""

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from orchestrator.config import RunConfig, demo_config
from orchestrator.driver.cluster import open_cluster
from orchestrator.driver.faults import signal_rank, wait_for
from orchestrator.driver.launch import Launched
from tests.benchmarks.bench_recovery import Bench, kill_workers, stop_workers
from tests.benchmarks.common import percentile
from tests.benchmarks.injections import injections
from tests.gpu.parts import Lab
from tests.gpu.rows import note, tell
from tests.support.experts import with_experts
from tests.support.run_command import EVERSTEP
from workers.keeper import progress_path
from workers.protocol import WorkerPhase
from workers.telemetry import read_progress

ACT_S_MAX: Final = 90.0
NUM_WORKERS: Final = 4
#: Kill to the end of the next step, and a stopped worker.
KILL_P50_S, KILL_S_MAX, STOP_S_MAX = 1.0, 2.5, 3.5
#: Largest difference of losses after equal steps.
NEAR: Final = 0.5
#: Trainings of four workers, by settings beside those of the demo.
LAYOUTS: Final[dict[str, list[str]]] = {
    "dp": [],
    "tp=2": ["parallel.tp=2"],
    "pp=2": ["parallel.pp=2", "model.tied=false"],
    "tp=2, pp=2": ["parallel.tp=2", "parallel.pp=2", "model.tied=false"],
    "pp=2, two stages a worker": [
        "parallel.pp=2", "parallel.stages_per_worker=2", "model.tied=false",
        "model.num_layers=4",
    ],
    "cp=2": ["parallel.cp=2"],
    "bf16": ["train.precision=bf16"],
    "ep=2": ["parallel.ep=2"],
}  # fmt: skip
FEW_LAYOUTS: Final = {
    "tp=2, pp=2, bf16": [*LAYOUTS["tp=2, pp=2"], *LAYOUTS["bf16"]],
}
ENDLESS: Final = (
    "train.steps=1000000", "train.schedule=constant", "recovery.infrastructure_failures_max=1000",
)  # fmt: skip


@contextlib.contextmanager
def cluster_for(config: RunConfig) -> Iterator[Any]:
    """Yield the simulated nodes that ``config`` asks for."""
    cluster = open_cluster(config)
    assert cluster is not None
    try:
        yield cluster
    finally:
        cluster.shutdown()


def train(
    config: RunConfig, cluster: Any, act: Callable[[Launched], None] = lambda _: None
) -> dict[str, Any]:
    """Train to the end, with ``act`` meanwhile; return the run's summary."""
    run = Launched(config, cluster)
    act(run)
    wait_for(run, lambda _: False, timeout_s=ACT_S_MAX)
    summary = run.summary()
    assert summary is not None
    note(f"{config.run.directory}: {summary['outcome']}, {summary['wall_s']:.1f} s")
    return summary


def reach(run: Launched, step: int, *, workers: int = NUM_WORKERS) -> dict[str, Any]:
    """Return the status once ``step`` is done and so many ``workers`` train, or more."""
    status = wait_for(
        run,
        lambda s: (
            s["phase"] == "training"
            and s["step"] >= step
            and sum(worker["rank"] >= 0 for worker in s["workers"]) >= workers
        ),
        timeout_s=ACT_S_MAX,
    )
    assert status is not None, "the run ended too soon"
    return status


def kills(lab: Lab) -> None:
    """Tell how long one endless run pauses for SIGKILL, SIGSTOP and two kills at once."""
    with lab.folder("kills") as folder:
        config = demo_config(f"{folder}/run", [*ENDLESS, "train.deterministic=false"])
        with cluster_for(config) as cluster:
            bench = Bench(config, cluster)
            bench.settle()
            killed = kill_workers(bench, 10 if lab.full else 2, standbys=0)
            took = [one["seconds"] for one in killed]
            lost = sum(one["lost_steps"] for one in killed)
            p50, longest = percentile(took, 0.5), max(took)
            what = f"{len(took)} kills, next step"
            tell("kills", f"{what}, p50", f"{p50:.2f} s", "<= 1.0", ok=p50 <= KILL_P50_S)
            tell(
                "kills", f"{what}, longest", f"{longest:.2f} s", "<= 2.5", ok=longest <= KILL_S_MAX
            )
            tell("kills", "steps lost in all", int(lost), "0", ok=lost == 0)
            (stopped,) = stop_workers(bench, 1)
            is_right = stopped["named_right"]
            seen = f"{stopped['seconds']:.2f} s, {'right' if is_right else 'wrong'} worker named"
            tell("kills", "SIGSTOP, next step", seen, "<= 3.5, right",
                 ok=is_right and stopped["seconds"] <= STOP_S_MAX)  # fmt: skip
            for phase in (WorkerPhase.FORMING, WorkerPhase.LOADING):
                before = bench.settle()
                fault_s = time.time()
                signal_rank(bench.run, bench.victim(before, 0), signal.SIGKILL)
                hit = kill_in(bench.run, phase, before["attempt"] + 1)
                found = bench.recovery(before, fault_s)
                seen = f"{found['seconds']:.2f} s, {found['lost_steps']:.0f} lost"
                if not hit:
                    seen += f"; no worker was seen {phase}"
                tell("kills", f"a second kill while {phase}, next step", seen, "trains on", ok=hit)


def kill_in(run: Launched, phase: WorkerPhase, attempt: int) -> bool:
    """Kill a worker that is in ``phase`` of ``attempt``; return whether one was met."""
    root = Path(run.names.shared_root)
    until_s = time.monotonic() + 10.0
    while time.monotonic() < until_s:
        for folder in root.iterdir() if root.exists() else ():
            for path in folder.glob(progress_path(Path(), "*").name):
                view = read_progress(path)
                if view is not None and view.attempt >= attempt and view.phase == phase:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(view.pid, signal.SIGKILL)
                        return True
    return False


def equal(lab: Lab) -> None:
    """Tell whether runs with two kills end with the weights of an undisturbed one."""
    steps = 120 if lab.full else 30
    asked = [f"train.steps={steps}", "train.warmup_steps=5", "checkpoint.every_steps=1000"]
    rounds = 3 if lab.full else 1

    def hurt(run: Launched) -> None:
        for number in (1, 2):
            # The place of the first one may not be filled yet.
            status = reach(run, number * steps // 4, workers=NUM_WORKERS + 1 - number)
            signal_rank(run, number, signal.SIGKILL)
            _await_attempt(run, status["attempt"] + 1)

    with lab.folder("equal") as folder:
        configs = [demo_config(f"{folder}/{n}", asked) for n in range(rounds + 1)]
        with cluster_for(configs[0]) as cluster:
            calm = train(configs[0], cluster)
            rough = [train(config, cluster, hurt) for config in configs[1:]]
    same = sum(one["weights_digest"] == calm["weights_digest"] for one in rough)
    attempts = [one["attempts"] for one in rough]
    tell("equal", f"weights after two kills, attempts {attempts}", f"{same} of {rounds} equal",
         f"{rounds} of {rounds}", ok=same == rounds)  # fmt: skip


def demo(lab: Lab) -> None:
    """Tell how the demo went, as its command says it."""
    with lab.folder("demo") as folder:
        command = [*EVERSTEP, "demo", "--json", "--directory", str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        answer = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    names = [name for name in ("undisturbed", "disturbed") if name in answer]
    walls = " and ".join(f"{answer[name]['wall_s']:.0f} s" for name in names)
    seen = f"{answer.get('weights_equal', 'failed')}, {walls}"
    tell("demo", "weights equal", seen, "True", ok=done.returncode == 0)


def _await_attempt(run: Launched, number: int) -> None:
    wait_for(run, lambda status: bool(status["attempt"] >= number), timeout_s=ACT_S_MAX)


def layouts(lab: Lab) -> None:
    """Tell whether every axis and bf16 train on, with a kill.

    The loss after the same steps is compared with that of the first one.
    """
    steps = 60 if lab.full else 30
    asked = [f"train.steps={steps}", "train.warmup_steps=5", "train.deterministic=false"]
    losses: dict[str, float] = {}

    def hurt(run: Launched) -> None:
        reach(run, 8)
        signal_rank(run, 1, signal.SIGKILL)

    with lab.folder("layouts") as folder, contextlib.ExitStack() as stack:
        cluster: Any = None
        experts = f"model.preset={with_experts(folder / 'experts')}"
        for name, settings in (LAYOUTS if lab.full else FEW_LAYOUTS).items():
            model = [experts] if name == "ep=2" else []
            config = demo_config(f"{folder}/{name}", [*asked, *settings, *model])
            cluster = cluster or stack.enter_context(cluster_for(config))
            summary = train(config, cluster, hurt if settings else lambda _: None)
            losses[name] = summary["final_loss"] or math.nan
            gap = abs(losses[name] - next(iter(losses.values())))
            # A pipeline's output layer is not its embedding, and experts are another model.
            is_near = math.isfinite(gap) and (gap < NEAR or name == "ep=2")
            is_fine = summary["outcome"] == "completed" and is_near
            seen = (
                f"{summary['outcome']} in {summary['attempts']} attempts, loss {losses[name]:.3f}"
            )
            tell("layouts", name, seen, "completed", ok=is_fine)


def diagnosis(lab: Lab) -> None:
    """Tell what runs say of faults that are injected, one of each kind."""
    kinds = ["nan", "skip", "slow3", "kernel", "idle"] if lab.full else ["nan"]
    if lab.on_cpu and "kernel" in kinds:
        kinds.remove("kernel")
    for one in injections(kinds, ["dp"], 1, phases_max=1):
        times = [
            f"{what} {s:.1f} s"
            for what, s in (("suspected", one.suspected_s), ("named", one.named_s))
            if s is not None
        ]
        seen = f"{one.verdict or 'nothing'}, {', '.join(times) or 'not in time'}"
        seen += "" if one.is_right else f": {one.evidence[:160]}"
        tell(
            "diagnosis",
            f"{one.kind} in {one.phase}",
            seen,
            "right worker and kind",
            ok=one.is_right and not one.is_wrong,
        )
