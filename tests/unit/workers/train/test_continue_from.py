"""A new run that begins behind a step of another training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from everstep import Session, TaskError, run

ROWS = torch.linspace(-1, 1, 32).reshape(16, 2)


def trained(directory: Path, steps: int, earlier: Any = None) -> list[int]:
    """Train; return the steps that were done."""
    seen: list[int] = []

    def task(session: Session) -> None:
        if earlier is not None:
            session.continue_from(earlier if isinstance(earlier, int) else str(earlier))
        model = session.model(lambda: nn.Linear(2, 2))
        optimizer = session.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=0.1))
        scheduler = session.register("scheduler", StepLR(optimizer, 2))
        for step in session.steps(len(ROWS)):
            session.train_step(lambda at: model(ROWS[at]).square().mean())
            scheduler.step()
            seen.append(step.number)

    run(task, directory=str(directory), steps=steps, global_batch=4, micro_batch=2)
    return seen


def weights(directory: Path) -> str:
    found: str = json.loads((directory / "result.json").read_text())["weights_digest"]
    return found


def test_it_ends_as_the_run_would_that_had_gone_on(tmp_path: Path) -> None:
    """Moments, the scheduler and the place in the data come along; steps of its own count more."""
    trained(tmp_path / "whole", 7)
    trained(tmp_path / "first", 3)
    version = tmp_path / "first/checkpoints/step-00000003"

    assert trained(tmp_path / "new", 5, version) == [4, 5]
    assert trained(tmp_path / "new", 7, version) == [6, 7]
    assert weights(tmp_path / "new") == weights(tmp_path / "whole")
    assert weights(tmp_path / "first") != weights(tmp_path / "whole")


def test_steps_that_were_done_elsewhere_are_counted(tmp_path: Path) -> None:
    assert trained(tmp_path, 5, 3) == [4, 5]
    assert trained(tmp_path, 7, 3) == [6, 7]


@pytest.mark.parametrize(
    ("earlier", "told"),
    [
        ("first", "session.continue_from: .*first"),
        ("moved", "is not a version in the checkpoints of a run"),
        ("first/checkpoints/step-00000003", "3 steps are done there, and train.steps=3"),
        (4, "4 steps are done there"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, earlier: Any, told: str) -> None:
    trained(tmp_path / "first", 3)
    (tmp_path / "first/checkpoints/step-00000003").rename(tmp_path / "moved")
    if earlier != "moved":
        (tmp_path / "moved").rename(tmp_path / "first/checkpoints/step-00000003")

    with pytest.raises(TaskError, match=told):
        trained(tmp_path / "new", 3, earlier if isinstance(earlier, int) else tmp_path / earlier)
