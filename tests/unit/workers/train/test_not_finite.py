"""Updates whose loss or gradient is not finite: left out on all workers, counted, and told."""

import copy
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from everstep import Session, Settings, TaskError, TrainSettings, run
from tests.support.train_told import BadGradient
from workers.settings import CheckpointSettings, NotFiniteSettings

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)
#: Both micro-batches of a step, the first, the second.
BOTH, FIRST, SECOND = (0, 1), (0,), (1,)
STEPS = 8

Spoil = Callable[[Tensor], Tensor]


SPOILS: Mapping[str, Spoil] = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss * math.inf,
    "gradient": BadGradient.apply,
}


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=False)


class Trained:
    """Observations of a run: weights and optimizer state after each step, and its samples."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.states: list[Any] = []
        self.indices: list[list[Any]] = []
        self.skipped: list[int] = []

    def see(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        whole = (one.full_tensor() for one in model.parameters())
        self.weights.append([one.detach().clone() for one in whole])
        self.states.append(copy.deepcopy(list(optimizer.state.values())))


def train(
    directory: Path,
    bad: Mapping[int, tuple[int, ...]],
    spoil: Spoil = SPOILS["nan"],
    *,
    make: Callable[[Any], torch.optim.Optimizer] = make_adamw,
    scale: float = 0.0,
    steps: int = STEPS,
    keep: int = 0,
    every: int = 1,
    **chosen: Any,
) -> Trained:
    """Train alone; ``bad`` names by step the micro-batches whose loss is spoiled."""
    found = Trained()

    def task(session: Session) -> None:
        model = session.model(build)
        optimizer = session.optimizer(lambda named: make(named.values()))
        if scale:
            session.register("scaler", GradScaler("cpu", init_scale=scale))

        def loss_of(indices: Any) -> Tensor:
            number = len(found.indices[-1])
            found.indices[-1].append(indices)
            loss: Tensor = (model(INPUTS[indices]) - 0.5).square().mean()
            return spoil(loss) if number in bad.get(session.step + 1, ()) else loss

        # With a name the data is not compared: `loss_of` is called for micro-batches alone.
        steps_left = session.steps(len(INPUTS), data_digest="inputs")
        for step in steps_left:
            found.indices.append([])
            session.train_step(loss_of)
            found.see(model, optimizer)
            if step.is_skipped:
                found.skipped.append(step.number)

    run(
        task,
        directory=str(directory),
        settings=Settings(
            train=TrainSettings(
                steps=steps, global_batch=4, micro_batch=2, lr=0.1, warmup_steps=0,
                schedule="constant", not_finite=NotFiniteSettings(**chosen),
            ),
            checkpoint=CheckpointSettings(every_steps=every, keep=keep),
        ),
    )  # fmt: skip
    return found


def plainly(
    indices: list[list[Any]],
    skipped: tuple[int, ...],
    make: Callable[[Any], torch.optim.Optimizer] = make_adamw,
) -> list[list[Tensor]]:
    """Return the weights after each step of a plain loop that leaves out the updates ``skipped``.

    It begins with the seed's weights, which are those of ``build``.
    """
    model = build()
    optimizer = make(model.parameters())
    weights = []
    for number, batches in enumerate(indices, start=1):
        if number not in skipped:
            for batch in batches:
                loss = (model(INPUTS[batch]) - 0.5).square().mean()
                (loss / len(batches)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([one.detach().clone() for one in model.parameters()])
    return weights


def lines(directory: Path, name: str = "rank0") -> list[dict[str, Any]]:
    text = (directory / f"metrics/{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("where", [BOTH, FIRST, SECOND])
def test_an_update_that_is_not_finite_is_left_out(
    tmp_path: Path, how: str, where: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Weights became NaN for good; state of the optimizer must not have one changed bit.

    The curve behind is that of a plain loop that leaves the update out.
    """
    found = train(tmp_path, {4: where}, SPOILS[how])

    for mine, plain in zip(found.weights, plainly(found.indices, (4,)), strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.weights[3], found.weights[2], strict=True))
    for before, after in zip(found.states[2], found.states[3], strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert found.skipped == [4]
    row = lines(tmp_path)[3]
    assert (row["loss"] is None) == (how != "gradient")
    assert row["grad_norm"] is None
    assert "step 4" in caplog.text
    assert "left out" in caplog.text
    if how != "gradient":
        assert ("micro-batch 2 of 2" in caplog.text) == (where == SECOND)
    else:
        assert "gradient of 0.bias" in caplog.text


MAKES: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": make_adamw,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1, foreach=False),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1, foreach=False),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=False),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("kind", MAKES)
def test_so_is_the_first_one_and_a_run_resumes_behind_it(tmp_path: Path, kind: str) -> None:
    """The optimizer has no state yet, which is not the same as a state of zeros."""
    make = MAKES[kind]
    whole = train(tmp_path / "whole", {1: BOTH, 2: FIRST}, make=make, steps=5)
    for steps in (1, 2, 3, 5):
        parts = train(tmp_path / "parts", {1: BOTH, 2: FIRST}, make=make, steps=steps)

    for mine, plain in zip(whole.weights, plainly(whole.indices, (1, 2), make), strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, plain, strict=True))
    for mine, again in zip(whole.weights[3:], parts.weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def test_too_many_in_a_row_end_the_run_and_name_the_last_finite_step(tmp_path: Path) -> None:
    """A run of which every later loss was null "completed", exit 0."""
    always = dict.fromkeys(range(4, STEPS + 1), BOTH)
    with pytest.raises(TaskError) as raised:
        train(tmp_path, always)

    assert "3 updates in a row" in str(raised.value)
    assert "The last finite step is 3 " in str(raised.value)
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]
    # The rows of an older attempt count: a run that is killed in between ends alike.
    with pytest.raises(TaskError, match="step 6 is not finite: "):
        train(tmp_path, always)
    found = train(tmp_path, {4: BOTH, 5: BOTH, 6: BOTH}, most=4)
    assert found.skipped == [6]


def test_two_in_a_row_again_and_again_end_nothing(tmp_path: Path) -> None:
    """Only a row counts."""
    found = train(tmp_path, {2: BOTH, 3: FIRST, 5: SECOND, 6: BOTH, 8: BOTH})

    assert found.skipped == [2, 3, 5, 6, 8]


def test_repeated_events_are_reported_ever_more_seldom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is an incident with a folder of its own, and a line in the terminal."""
    found = train(tmp_path, dict.fromkeys(range(2, 74, 2), FIRST), steps=74, every=10, keep=2)

    assert len(found.skipped) == 36
    told = [record.message for record in caplog.records if "is not finite" in record.message]
    assert len(told) == 10
    assert told[-1].endswith("(number 32 so far)")


def test_stop_ends_the_run_with_the_first_one(tmp_path: Path) -> None:
    """Nothing of the step is taken, so the same command does it again."""
    with pytest.raises(TaskError, match="step 4 is not finite: "):
        train(tmp_path, {4: FIRST}, action="stop")

    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3]
    assert len(train(tmp_path, {}, action="stop").indices) == STEPS - 3


def test_ignore_takes_the_update_and_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once: the following ones are of the same row."""
    found = train(tmp_path, {3: BOTH}, action="ignore")

    assert all(one.isnan().any() for one in found.weights[-1])
    assert found.skipped == []
    assert len([record for record in caplog.records if "not finite" in record.message]) == 1


def test_buffers_of_a_step_that_is_left_out_stay_as_they_were(tmp_path: Path) -> None:
    """BatchNorm took the NaN into its running mean, and every later evaluation was NaN."""
    means: list[Tensor] = []

    def task(session: Session) -> None:
        model = session.model(
            lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)),
            average_buffers=["*.running_mean", "*.running_var"],
        )
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(len(INPUTS)):
            factor = math.nan if step.number == 3 else 1.0

            def loss_of(indices: Any, factor: float = factor) -> Tensor:
                loss: Tensor = model(INPUTS[indices] * factor).square().mean()
                return loss

            session.train_step(loss_of)
            means.append(model[0].running_mean.clone())

    run(task, directory=str(tmp_path), steps=5, global_batch=4, micro_batch=2)

    assert torch.equal(means[2], means[1])
    assert not torch.equal(means[3], means[2])
    assert all(one.isfinite().all() for one in means)


def test_a_scaler_leaves_out_what_overflows_and_that_counts_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins with a scale that is too large. A loss that is not finite is no overflow."""
    overflowing = train(tmp_path / "overflows", {}, scale=2.0**75, steps=20)
    assert len(overflowing.skipped) > NotFiniteSettings().most
    assert not caplog.records

    with pytest.raises(TaskError, match="3 updates in a row"):
        train(tmp_path / "nan", dict.fromkeys(range(4, 9), BOTH), scale=4.0)
    # No scale is small enough for a gradient that is NaN.
    bad = dict.fromkeys(range(2, 30), BOTH)
    with pytest.raises(TaskError, match="3 updates in a row"):
        train(tmp_path / "gradient", bad, SPOILS["gradient"], scale=16.0, steps=30)


def test_an_evaluation_that_is_not_finite_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends nothing: the weights are what they were."""

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))

        def loss_of(indices: Any) -> tuple[Tensor, int]:
            factor = math.nan if 7 in indices.tolist() else 1.0
            return model(INPUTS[indices]).square().mean() * factor, len(indices)

        for step in session.steps(len(INPUTS)):
            session.train_step(lambda indices: model(INPUTS[indices]).square().mean())
            if step.number > 1:
                session.evaluate(loss_of, 12)

    with caplog.at_level(logging.WARNING):
        run(task, directory=str(tmp_path), steps=3, global_batch=4, micro_batch=2)

    told = [record.message for record in caplog.records if "evaluation" in record.message]
    assert len(told) == 1
    assert "step 2" in told[0]
    assert "samples 6 to 7" in told[0]
