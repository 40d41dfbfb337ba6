"""Workers that share a GPU, on a cluster whose nodes have one in Ray's books."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver import read_logs
from orchestrator.driver.faults import signal_rank, wait_for
from orchestrator.driver.launch import Launched

pytestmark = pytest.mark.ray

RUN_S_MAX = 240.0
SCRIPT = """
import os

import torch
import everstep

def train(session):
    print("gpu", os.environ["CUDA_VISIBLE_DEVICES"])
    model = session.model(lambda: torch.nn.Linear(4, 1))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    for _ in session.steps(64):
        session.train_step(lambda samples: model(torch.ones(len(samples), 4)).square().mean())

everstep.run(train)
"""


@pytest.mark.chaos
def test_four_workers_share_a_gpu_and_one_is_replaced(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A part of a GPU is a resource of Ray's like a whole one; which GPU it is, only Ray knows."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    config = make_config(
        cluster__gpus_per_worker=0.25, run__script=script, train__steps=100_000, workers__max=4
    )
    run = Launched(config, nodes)

    def reach(attempt: int) -> dict[str, Any]:
        status = wait_for(
            run,
            lambda s: (
                s["attempt"] >= attempt
                and s["step"] > 0
                and s["phase"] == "training"
                and sum(worker["rank"] >= 0 for worker in s["workers"]) == 4
            ),
            timeout_s=RUN_S_MAX,
        )
        assert status is not None
        return status

    before = reach(1)
    signal_rank(run, 3, signal.SIGKILL)
    reach(before["attempt"] + 1)
    run.stop("seen")
    wait_for(run, lambda _: False, timeout_s=RUN_S_MAX)

    told = {
        (line.rank, line.text)
        for line in read_logs(config.run.directory, rank=None, attempt=None, follow=False)
    }
    assert {(rank, "gpu 0") for rank in range(4)} <= told
