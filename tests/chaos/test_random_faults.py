"""Many random faults in one unattended run: nothing lost, nothing doubled, the same weights.

Judged from what the run wrote (metrics and the data order), not from internals.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig, demo_config
from orchestrator.driver.faults import kill_node_of, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster
from tests.support.attempts import curve
from tests.support.history import read_history
from tests.support.reach import kill_keeper_of

pytestmark = pytest.mark.timeout(1500)

SUPPORT = Path(__file__).parents[1] / "support"
ACT_S_MAX = 120.0
FAULTS = ("kill", "kill", "kill", "stop", "node", "controller", "keeper")


def _num_training(status: dict[str, Any]) -> int:
    return sum(worker["rank"] >= 0 for worker in status["workers"])


def _hurt(run: Launched, cluster: HostedCluster, kind: str, rank: int) -> None:
    if kind == "controller":
        os.kill(run.controller_pid(), signal.SIGKILL)
    elif kind == "keeper":
        kill_keeper_of(run, rank)
    elif kind == "node":
        kill_node_of(run, rank)
        cluster.add_node()
    else:
        signal_rank(run, rank, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def _steps_later(run: Launched, num_steps: int) -> dict[str, Any] | None:
    """Return the status once the run has trained ``num_steps`` more than it has now."""
    now = wait_for(run, lambda s: s["phase"] == "training", timeout_s=ACT_S_MAX)
    if now is None:
        return None
    goal = now["step"] + num_steps
    return wait_for(
        run, lambda s: s["phase"] == "training" and s["step"] >= goal, timeout_s=ACT_S_MAX
    )


def _torment(run: Launched, cluster: HostedCluster, *, seed: int, count: int) -> list[str]:
    """Inject ``count`` faults, each a random while after the run trains again."""
    draw = random.Random(seed)
    done: list[str] = []
    while len(done) < count:
        status = _steps_later(run, draw.randint(1, 6))
        assert status is not None, f"the run ended after {len(done)} faults: {run.summary()}"
        time.sleep(draw.random() * 0.2)  # a phase of the step drawn from the seed
        kind = draw.choice(FAULTS)
        _hurt(run, cluster, kind, draw.randrange(_num_training(status)))
        done.append(kind)
    return done


def _finish(run: Launched) -> dict[str, Any]:
    summary = run.follow(lambda _: None)
    assert summary["outcome"] == "completed", summary["reason"]
    return summary


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(name: str, steps: int) -> RunConfig:
        settings = [f"train.steps={steps}", "workers.min=1"]
        return demo_config(str(tmp_path / name), settings)

    return make


def test_fifty_random_faults_lose_no_sample_and_double_none(
    cluster: HostedCluster, make: Callable[..., RunConfig]
) -> None:
    """One unattended run; every sample of the order enters the committed history once."""
    config = make("fifty", 900)
    run = Launched(config, cluster)

    _torment(run, cluster, seed=50, count=50)
    _finish(run)

    read_history(config.run.directory).check_exactly_once(config)


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("train_scheduled.py", 1500),
        ("ports/trainer_elastic.py", 300),
        ("ports/nanogpt_elastic.py", 400),
        ("ports/titan_elastic.py", 300),
        ("ports/lightning_elastic.py", 400),
    ],
)
def test_a_script_keeps_its_own_state_through_ten_faults(
    cluster: HostedCluster, tmp_path: Path, script: str, steps: int
) -> None:
    """A scheduler, an average, a loader, every port of the guide: the curve of a calm run."""
    if "trainer" in script:
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    if "lightning" in script:
        pytest.importorskip("lightning", reason="the extra interop is not installed")
    ends = []
    for name in ("calm", "rough"):
        config = demo_config(
            str(tmp_path / name),
            [
                f"run.script={SUPPORT / script}",
                f"run.arguments=[{tmp_path / 'output'}]",
                f"train.steps={steps}",
                "train.global_batch=8",
                "train.micro_batch=2",
                "train.deterministic=true",
                "workers.min=1",
            ],
        )
        run = Launched(config, cluster)
        faults = _torment(run, cluster, seed=7, count=10) if name == "rough" else []
        digest = _finish(run)["weights_digest"]
        ends.append((digest, curve(Path(config.run.directory))))

    assert ends[0] == ends[1], faults
