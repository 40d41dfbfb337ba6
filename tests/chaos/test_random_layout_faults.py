"""Random faults on eight workers in three axes: nothing is lost but a step, the curve goes on."""

import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig, demo_config
from orchestrator.driver.faults import kill_node_of, signal_rank
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster
from orchestrator.shell.names import RunNames, run_id
from tests.support.attempts import finish, lines
from tests.support.history import read_history
from tests.support.reach import ACT_S_MAX, reach
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from workers.keeper import progress_path
from workers.protocol import WorkerPhase
from workers.settings import Settings
from workers.telemetry import open_progress

pytestmark = pytest.mark.timeout(1500)

_say = logging.getLogger(__name__)

#: Stages of tensor-parallel pairs, twice.
WHOLE = ParallelLayout(pp=2, dp_shard=2, tp=2)
CPUS_PER_NODE = WHOLE.world_size // 2
NUM_FAULTS = 10
#: The phase in which a worker is killed; None: at any time, or with its node, or only stopped.
KINDS: dict[str, WorkerPhase | None] = {
    "kill": None,
    "stop": None,
    "node": None,
    "schedule": WorkerPhase.BACKWARD,
    "forming": WorkerPhase.FORMING,
    "loading": WorkerPhase.LOADING,
}


class Tormentor:
    """Hurts a run of eight workers, again and again.

    Nodes take turns: one with several failures more than the others is left alone.
    """

    def __init__(self, run: Launched, cluster: HostedCluster, seed: int) -> None:
        self.run, self._cluster, self._draw = run, cluster, random.Random(seed)
        self._names = RunNames(run_id(run.config.run.directory))
        self._hurt: Counter[str] = Counter()

    def torment(self, num_faults: int) -> None:
        """Do so many faults, of every kind, each a random while after all workers train."""
        kinds = [kind for _ in range(0, num_faults, len(KINDS)) for kind in self._shuffled()]
        step, attempt = 1, 0
        for kind in kinds[:num_faults]:
            whole = reach(self.run, step, workers=WHOLE.world_size, attempt=attempt)
            before = reach(self.run, whole["step"] + self._draw.randint(1, 4))
            _say.info("step %d, %s: %s", before["step"], before["layout"], kind)
            self._fault(kind, before)
            step, attempt = before["step"], before["attempt"] + 1
        reach(self.run, step, workers=WHOLE.world_size, attempt=attempt)

    def _shuffled(self) -> list[str]:
        return self._draw.sample(list(KINDS), len(KINDS))

    def _fault(self, kind: str, before: dict[str, Any]) -> None:
        victim, phase = self._victim(before), KINDS[kind]
        if kind == "node":
            kill_node_of(self.run, victim["rank"])
            self._cluster.add_node()
        elif phase is WorkerPhase.BACKWARD:
            self._kill_in(phase, [victim], before["attempt"])
        else:
            self._hurt[victim["node"]] += 1
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            signal_rank(self.run, victim["rank"], number)
            if phase is not None:
                others = [one for one in _members(before) if one["rank"] != victim["rank"]]
                self._kill_in(phase, others, before["attempt"] + 1)

    def _victim(self, before: dict[str, Any]) -> dict[str, Any]:
        members = _members(before)
        least = min(self._hurt[worker["node"]] for worker in members)
        return self._draw.choice([one for one in members if self._hurt[one["node"]] == least])

    def _kill_in(self, phase: WorkerPhase, workers: Sequence[dict[str, Any]], attempt: int) -> None:
        """Kill the first that enters ``phase``, in ``attempt`` or later, a millisecond after."""
        pages = []
        for worker in workers:
            directory = Path(self._names.shared_directory(worker["node"]))
            pages.append((worker, open_progress(progress_path(directory, worker["worker"]))))
        deadline_s = time.monotonic() + ACT_S_MAX
        while time.monotonic() < deadline_s:
            for worker, page in pages:
                view = page.view() if page is not None else None
                if view is not None and view.phase is phase and view.attempt >= attempt:
                    os.kill(worker["pid"], signal.SIGKILL)
                    self._hurt[worker["node"]] += 1
                    return
            time.sleep(0.001)
        pytest.fail(f"no worker came to {phase} of attempt {attempt}")


def _members(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(worker) for worker in status["workers"] if worker["rank"] >= 0]


def _eight(directory: Path, fixed: str) -> RunConfig:
    return demo_config(
        str(directory),
        [
            "model.preset=tiny",
            "model.tied=false",
            "train.steps=100000",
            "train.global_batch=8",
            "train.micro_batch=1",
            "train.schedule=constant",
            # With more, a difference of 1e-8 grows to 1e-2 in 100 steps, and a fast machine makes
            # more than that.
            "train.lr=1e-4",
            "train.warmup_steps=2",
            "train.deterministic=true",
            "parallel.tp=2",
            "parallel.pp=2",
            f"parallel.fixed={fixed}",
            f"workers.max={WHOLE.world_size}",
            "workers.standby_per_node=0",
            "checkpoint.every_steps=50000",
        ],
    )


@pytest.mark.parametrize(
    ("fixed", "calm", "tolerance"),
    [
        pytest.param("[]", ParallelLayout(), 1e-6, id="any layout"),
        pytest.param("[tp, pp]", replace(WHOLE, dp_shard=1), 0.0, id="only dp"),
    ],
)
def test_ten_random_faults_on_eight_workers_leave_the_same_curve(
    cluster: HostedCluster, tmp_path: Path, fixed: str, calm: ParallelLayout, tolerance: float
) -> None:
    """The curve of workers that nothing disturbs; to the bit if only data parallelism changes."""
    config = _eight(tmp_path / "run", fixed)
    run = Launched(config, cluster)
    Tormentor(run, cluster, seed=8).torment(NUM_FAULTS)
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    history = read_history(config.run.directory)
    history.check_exactly_once(config, num_steps=summary["steps"])
    for each in summary["incidents"]:
        begun_s, ended_s = each["t_fault_s"] or each["t_detect_s"], each["t_first_step_s"]
        took = f"{ended_s - begun_s:.2f} s" if ended_s is not None else "no step"
        _say.info(
            "%s: %s to %s, %d lost, %s",
            each["kind"], each["layout_before"], each["layout_after"], each["lost_steps"], took,
        )  # fmt: skip
        assert each["lost_steps"] <= 1, each
    directory = tmp_path / "calm"
    directory.mkdir()
    with Run(directory) as alone:
        settings = Settings(
            model=config.model,
            data=config.data,
            checkpoint=config.checkpoint,
            train=replace(config.train, steps=summary["steps"]),
        )
        finish(alone, settings, num_workers=calm.world_size, layout=calm)
        expected = {line["step"]: line["loss"] for line in lines(alone)}
    for line in history.committed():
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=tolerance, abs=0.0), line
