"""A script that ends its run before the last step, alone: complete, and for good."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from everstep import Session, TaskError, run
from ucp_core.native import find_committed
from ucp_core.storage import LocalStore

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


def train(directory: Path, end: Any, *, registers: bool = False, steps: int = 9) -> list[int]:
    """Train; ``end(session, step)`` is called in the body and says whether to break."""
    seen: list[int] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        optimizer = session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
        if registers:
            scheduler = session.register("scheduler", StepLR(optimizer, 2))

        def loss_of(indices: Any) -> Tensor:
            loss: Tensor = model(INPUTS[indices]).square().mean()
            return loss

        for step in session.steps(len(INPUTS)):
            session.train_step(loss_of)
            seen.append(step.number)
            if registers:
                scheduler.step()
            if end(session, step.number):
                break
        seen.append(-session.step)

    run(task, directory=str(directory), steps=steps, global_batch=4, micro_batch=2)
    return seen


def stop_at_4(session: Session, number: int) -> bool:
    if number == 4:
        session.stop("no progress")
    return False


def break_at_4(_session: Session, number: int) -> bool:
    return number == 4


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("end", [stop_at_4, break_at_4])
def test_the_run_is_complete_and_a_restart_says_so(
    tmp_path: Path,
    end: Any,
    registers: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both ended in an error, and a restart trained to the last step."""
    assert train(tmp_path, end, registers=registers) == [1, 2, 3, 4, -4]

    found = find_committed(LocalStore(), f"{tmp_path}/checkpoints", lineage=())
    assert found is not None
    assert found.step == 4
    steps = [json.loads(one)["step"] for one in _lines(tmp_path / "metrics/rank0.jsonl")]
    assert steps == [1, 2, 3, 4]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 4
    assert ("no progress" in result["ended"]) == (end is stop_at_4)
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, end, registers=registers) == [-4]
    assert "the run has ended with step 4" in caplog.text
    # The registered state belongs to step 4: the rate was halved twice.
    (tmp_path / "stopped.json").unlink()
    again = train(tmp_path, lambda *_: False, registers=registers, steps=6)
    assert again == [5, 6, -6]
    rates = [json.loads(one)["lr"] for one in _lines(tmp_path / "metrics/rank0.jsonl")]
    if registers:
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_before_the_update_it_is_the_step_under_way(tmp_path: Path) -> None:
    """A script may see in a micro-batch that it has seen enough."""

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(len(INPUTS)):
            if step.number == 3:
                session.stop("enough")
            session.train_step(lambda indices: model(INPUTS[indices]).square().mean())

    run(task, directory=str(tmp_path), steps=9, global_batch=4, micro_batch=2)

    assert json.loads((tmp_path / "result.json").read_text())["step"] == 3


def test_a_loop_that_was_left_before_its_first_step_is_a_mistake(tmp_path: Path) -> None:
    """Nothing was trained, so nothing is complete."""

    def task(session: Session) -> None:
        session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for _ in session.steps(len(INPUTS)):
            break

    with pytest.raises(TaskError, match=r"ended after step 0 of train\.steps=9"):
        run(task, directory=str(tmp_path), steps=9, global_batch=4, micro_batch=2)
