"""A user installs everstep and has no checkout."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.installed import Installed, build_wheel

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'everstep[dev]'")

SCRIPT = """
import torch
from torch import nn

from everstep import Session, run


def train(session: Session) -> None:
    inputs = torch.linspace(-1, 1, 64).reshape(-1, 1)
    model = session.model(lambda: nn.Linear(1, 1))
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    for step in session.steps(len(inputs)):
        for samples in step.micro_batches():
            loss = (model(inputs[samples]) - inputs[samples]).square().mean()
            step.backward(loss, tokens=len(samples))
        step.apply()
        print("step", step.number)


run(train)
"""


def test_a_wheel_trains_an_example_and_a_script(tmp_path: Path) -> None:
    """Everything that a run needs must be in the wheel, also in the processes of workers."""
    installed = Installed(build_wheel(tmp_path), tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    small = ("train.steps=6", "workers.max=2", "workers.standby_per_node=0")
    example = ("run", "local/small", *small, "--local-nodes=1", "--json")

    # Each waits most of the time for a cluster of its own.
    with ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(installed.run, "everstep", *example, *words)
            for words in (
                ("model.preset=tiny", "workers.max=1"),
                ("run.script=train.py", "run.directory=runs/scripted"),
            )
        ]
        built_in, script = (one.result() for one in begun)

    assert built_in.returncode == 0, built_in.stderr
    assert json.loads(built_in.stdout)["steps"] == 6
    assert script.returncode == 0, script.stderr
    assert json.loads(script.stdout)["steps"] == 6
    log = tmp_path / "runs/scripted/logs/attempt-0001/rank1.log"
    assert log.read_text().splitlines() == [f"step {number}" for number in range(1, 7)]
    assert installed.run("everstep", "report", "runs/scripted").returncode == 0


@pytest.mark.chaos
def test_a_wheel_runs_the_demo(tmp_path: Path) -> None:
    """It takes two minutes, so it runs with the long ones."""
    installed = Installed(build_wheel(tmp_path), tmp_path)

    demo = installed.run("everstep", "demo", "--json")

    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)["weights_equal"] is True
    assert (tmp_path / "runs/demo/disturbed/report.html").is_file()
