"""Workers and commands that somebody else tells to end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.driver.faults import member, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.report import read_run
from tests.support.snapshots import eventually

pytestmark = pytest.mark.ray

RUN_S_MAX = 240.0
#: Its third step has a snapshot, since that of the second is copied; the fourth step lasts until a
#: file is there.
SLOW = """
import sys, time
from pathlib import Path

import torch
import everstep

def train(session):
    model = session.model(lambda: torch.nn.Linear(4, 1))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    for step in session.steps(64):
        while step.number == 4 and not Path(sys.argv[1]).exists():
            time.sleep(0.05)
        for samples in step.micro_batches():
            step.backward(model(torch.ones(len(samples), 4)).square().mean(), tokens=1)
        writer = session._boundary._writer
        while step.number == 3 and (not writer.is_ready or writer.is_behind()):
            time.sleep(0.01)
        step.apply()

everstep.run(train)
"""


FEW = {"workers__max": 2, "workers__standby_per_node": 0}


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_gets_sigterm_or_sigint_leaves_with_its_step_saved(
    begin_endless: Callable[..., Launched], number: signal.Signals
) -> None:
    """Ray's handler ends it in the middle of a step, at the next call; SIGINT a raylet blocks."""
    run = begin_endless(**FEW)
    before = wait_for(
        run,
        lambda s: s["phase"] == "training" and s["step"] > 3 and len(s["workers"]) == 2,
        timeout_s=RUN_S_MAX,
    )
    assert before is not None
    victim = member(before, 1)
    os.kill(victim["pid"], number)
    after = wait_for(
        run,
        lambda s: s["phase"] == "training" and s["attempt"] > before["attempt"] and s["step"] > 9,
        timeout_s=RUN_S_MAX,
    )

    assert after is not None
    assert victim["worker"] not in {worker["worker"] for worker in after["workers"]}
    directory = run.config.run.directory
    assert eventually(lambda: len(read_run(directory).incidents) > 0)
    (incident, *_) = read_run(directory).incidents
    assert (incident.kind, incident.guilty) == ("preemption", (victim["worker"],))
    assert incident.evidence == f"process {victim['pid']} got {number.name}"
    assert incident.lost_steps == 0


def test_a_stopped_run_stores_at_once_what_memory_holds(
    begin_endless: Callable[..., Launched], tmp_path: Path
) -> None:
    """A supervisor that asked it to end waits for 30 s, and a step may take longer."""
    script, goes_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SLOW)
    run = begin_endless(
        run__script=script,
        run__arguments=[str(goes_on)],
        checkpoint__every_steps=1000,
        **FEW,
    )
    wait_for(run, lambda s: s["redundancy"]["step"] == 3, timeout_s=RUN_S_MAX)

    run.stop("SIGTERM ended the command that runs it")

    manifest = Path(run.config.run.directory, "checkpoints/step-00000003/manifest.json")
    assert eventually(manifest.exists, within_s=RUN_S_MAX)
    goes_on.touch()
    wait_for(run, lambda _: False, timeout_s=RUN_S_MAX)
    summary = run.summary()
    assert summary is not None
    assert (summary["outcome"], summary["steps"]) == ("stopped", 4)
