"""A rank that hangs in a line of its script: what is kept of it says which rank, and which line."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver import diagnose_paths
from orchestrator.driver.launch import Launched
from orchestrator.fault_kinds import FaultKind

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from everstep import Session, run

    def stuck() -> None:
        time.sleep(1000)  # a lock that is never released

    def train(session: Session) -> None:
        inputs = torch.linspace(-1, 1, 64).reshape(-1, 1)
        model = session.model(lambda: nn.Linear(1, 1))
        session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
        for step in session.steps(len(inputs)):
            if step.number == 12 and session.rank == 1 and not Path("{mark}").exists():
                Path("{mark}").touch()
                stuck()
            for samples in step.micro_batches():
                loss = (model(inputs[samples]) - inputs[samples]).square().mean()
                step.backward(loss, tokens=len(samples))
            step.apply()

    if __name__ == "__main__":
        run(train)
"""


def test_a_hang_keeps_stacks_rings_and_reports(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The guilty process is killed at once; without these, one line would be left of it."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{mark}", str(tmp_path / "hung")))
    config = make_config(
        train__steps=16,
        train__warmup_steps=2,
        workers__max=2,
        workers__standby_per_node=0,
        parallel__collective_timeout_s=12,
        run__script=str(script),
    )

    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    (hang,) = [each for each in summary["incidents"] if each["kind"] == "hang"]
    assert (hang["rule"], hang["verdict"]) == ("missing", "absent")
    folder = Path(config.run.directory, hang["folder"])
    assert json.loads((folder / "incident.json").read_text()) == hang

    (guilty,) = hang["guilty"]
    stacks = {path.stem: path.read_text() for path in (folder / "stacks").iterdir()}
    assert len(stacks) == 2
    line = next(n for n, x in enumerate(script.read_text().splitlines(), 1) if "time.sleep" in x)
    assert f'{script}", line {line} in stuck' in stacks[guilty]
    (waiting,) = stacks.keys() - {guilty}
    assert " in _wait_in_slices" in stacks[waiting], "it was asked after its fence"

    reports = json.loads((folder / "reports.json").read_text())
    assert {row["worker"] for row in reports["workers"]} == stacks.keys()
    assert {path.stem for path in (folder / "rings").iterdir()} == stacks.keys()
    (told,) = diagnose_paths([str(folder)])
    assert (told.kind, told.guilty.ranks) == (FaultKind.ABSENT, (1,))
