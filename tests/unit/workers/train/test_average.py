"""``session.average``: an average of the weights that is saved, resumed, evaluated and exported."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from everstep import Session, Settings, TaskError, run
from orchestrator.driver import export_run
from orchestrator.errors import RunNotFoundError
from workers.settings import CheckpointSettings, TrainSettings

INPUTS = torch.linspace(-1, 1, 64).reshape(16, 4)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 4))


def settings(steps: int) -> Settings:
    return Settings(
        train=TrainSettings(steps=steps, global_batch=4, micro_batch=2, lr=0.1, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )


def train(
    directory: Path, *, steps: int = 6, stop_at: int = 0, average: bool = True, every: int = 2
) -> dict[str, Any]:
    """Train; return weights, the average, and an average that the script computes by itself."""
    found: dict[str, Any] = {}

    def task(session: Session) -> None:
        model = session.model(build)
        session.optimizer(lambda named: torch.optim.Adam(named.values()))
        kept = session.average(decay=0.75, every=every) if average else None

        def weights() -> dict[str, torch.Tensor]:
            return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}

        def loss_of(i: Any) -> tuple[torch.Tensor, int]:
            return (model(INPUTS[i]) - INPUTS[i]).square().mean(), len(i)

        own = weights()
        for step in session.steps(len(INPUTS)):
            session.train_step(loss_of)
            if step.number % every == 0:
                for name, value in weights().items():
                    own[name] = (own[name] - value) * 0.75 + value
            if kept is not None and step.number == 3:
                with kept.swapped():
                    found["swapped"] = session.evaluate(loss_of, 16)
            if step.number == stop_at:
                raise RuntimeError
        found["weights"], found["own"] = weights(), own
        if kept is not None:
            found["loss"] = session.evaluate(loss_of, 16)
            with kept.swapped():
                found["average"] = weights()
                found["loss of average"] = session.evaluate(loss_of, 16)

    with pytest.raises(TaskError, match="RuntimeError") if stop_at else nullcontext():
        run(task, directory=str(directory), settings=settings(steps))
    return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_the_average_is_that_of_a_script_and_leaves_training_alone(tmp_path: Path) -> None:
    """The block with the average in place of the weights is within training."""
    found = train(tmp_path / "with")
    plain = train(tmp_path / "without", average=False)
    assert_equal(found["weights"], plain["weights"])
    assert_equal(found["average"], found["own"])
    assert found["loss"] != found["loss of average"]


def test_the_average_goes_on_after_a_fault(tmp_path: Path) -> None:
    """An average that a script keeps by itself begins again from the weights of the resume."""
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", stop_at=5)
    resumed = train(tmp_path / "cut")
    assert_equal(whole["average"], resumed["average"])
    assert_equal(whole["weights"], resumed["weights"])


def test_an_average_may_come_and_go_between_starts(tmp_path: Path) -> None:
    """A version without what the model needs, or with more, can count as that of another model."""
    train(tmp_path, steps=2, average=False)
    assert train(tmp_path, steps=4)["average"]
    train(tmp_path, steps=6, average=False)


def test_the_average_is_exported_in_place_of_the_weights(tmp_path: Path) -> None:
    found = train(tmp_path / "run")
    for name, options in {"average": {"average": True}, "weights": {}}.items():
        target = tmp_path / name
        export_run(
            str(tmp_path / "run"), str(target), format="huggingface", memory_bytes=32 << 20,
            **options,
        )  # fmt: skip
        (file,) = target.glob("*.safetensors")
        held = safetensors.numpy.load_file(file)
        assert held.keys() == found[name].keys()
        for key, value in held.items():
            assert np.array_equal(value, found[name][key].numpy()), key
    train(tmp_path / "plain", average=False, steps=1)
    with pytest.raises(RunNotFoundError, match=r"session\.average"):
        export_run(
            str(tmp_path / "plain"), str(tmp_path / "none"), format="huggingface",
            memory_bytes=32 << 20, average=True,
        )  # fmt: skip


def refused(tmp_path: Path, wrong: Any, told: str) -> None:
    def task(session: Session) -> None:
        model = session.model(build)
        session.optimizer(lambda named: torch.optim.Adam(named.values()))
        wrong(session, model)

    with pytest.raises(TaskError, match=told):
        run(task, directory=str(tmp_path), settings=settings(2))


def train_inside(session: Session, model: Any) -> None:
    average = session.average(decay=0.5)
    for _ in session.steps(16):
        with average.swapped():
            session.train_step(lambda i: model(INPUTS[i]).square().mean())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda _, model: AveragedModel(model), r"session\.average\(decay=0\.999\)"),
        (lambda session, _: session.average(decay=1.0), "decay=1.0 must be at least 0"),
        (train_inside, "a step trains inside"),
    ],
    ids=["copy of the model", "decay", "step inside"],
)
def test_what_would_be_no_average_is_refused(tmp_path: Path, wrong: Any, told: str) -> None:
    refused(tmp_path, wrong, told)
