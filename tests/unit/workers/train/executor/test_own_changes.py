"""Changes that a script makes by itself, and a step would drop or mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from everstep import Session, TaskError, run

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Halving:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(
    directory: Path,
    *,
    after_backward: Callable[[Any, Any, Any], object] = lambda *_: None,
    build: Callable[[], nn.Module] = lambda: nn.Linear(2, 2),
    rate: Any = 0.5,
    schedule: Callable[[Session, Any], Any] = lambda *_: None,
    steps: int = 3,
) -> list[float]:
    """Train; return the learning rates of the updates."""
    rates: list[float] = []

    def task(session: Session) -> None:
        model = session.model(build)
        optimizer = session.optimizer(lambda named: SGD(named.values(), lr=rate))
        optimizer.register_step_pre_hook(lambda *_: rates.append(float(group["lr"])))
        (group,) = optimizer.param_groups
        scheduler = schedule(session, optimizer)
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                loss = (model(INPUTS[samples]) - INPUTS[samples]).square().mean()
                step.backward(loss, tokens=len(samples))
            after_backward(model, optimizer, step)
            step.apply()
            if scheduler is not None:
                scheduler.step()

    run(task, directory=str(directory), steps=steps, global_batch=4, micro_batch=2)
    return rates


def clip(model: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_each(model: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)


def mask(model: Any, *_: Any) -> None:
    model.weight.grad = model.weight.grad * 0


def set_rate(_: Any, optimizer: Any, step: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / step.number


def fill_rate(_: Any, optimizer: Any, __: Any) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.1)


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 0)
    return model


def hook_late(model: Any, *_: Any) -> None:
    model.weight.register_hook(lambda gradient: gradient * 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"after_backward": clip}, "step 1: gradients were changed.*set clip_norm"),
        ({"after_backward": clip_each}, "step 1: the gradient of bias was changed.*clip_norm"),
        ({"after_backward": mask}, "step 1: the gradient of weight.*register_step_pre_hook"),
        ({"after_backward": set_rate}, "step 1: the learning rate of SGD was set to 0.1 "),
        ({"after_backward": fill_rate, "rate": torch.tensor(0.5)}, "step 1: the learning rate"),
        (
            {"schedule": lambda _, optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))},
            "step 2: .*a scheduler that is not registered",
        ),
        ({"build": hooked}, "parameter weight has a hook"),
        ({"after_backward": hook_late}, "parameter weight has a hook"),
    ],
    ids=[
        "clip",
        "clip each",
        "mask",
        "rate",
        "tensor as rate",
        "not registered",
        "hook",
        "hook after build",
    ],
)
def test_what_a_step_would_drop_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        train(tmp_path, **changes)


def test_a_gradient_may_be_dropped(tmp_path: Path) -> None:
    def drop(model: Any, *_: Any) -> None:
        model.bias.grad = None

    assert len(train(tmp_path, after_backward=drop)) == 3


def test_a_registered_scheduler_of_ones_own_decides_also_after_a_resume(tmp_path: Path) -> None:
    def halving(session: Session, optimizer: Any) -> Any:
        return session.register("halving", Halving(optimizer))

    assert train(tmp_path, schedule=halving, steps=2) == [0.5, 0.25]
    assert train(tmp_path, schedule=halving, steps=4) == [0.125, 0.0625]


def test_marks_of_parameters_reach_the_function_that_makes_the_optimizer(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    def build() -> nn.Module:
        model: Any = nn.Linear(2, 2)
        model.bias._no_weight_decay = True  # as the models of Mamba say it
        return model  # type: ignore[no-any-return]

    def task(session: Session) -> None:
        session.model(build)

        def make(named: Any) -> SGD:
            seen.update((key, hasattr(one, "_no_weight_decay")) for key, one in named.items())
            return SGD(named.values())

        session.optimizer(make)

    with pytest.raises(TaskError, match="the script ended"):
        run(task, directory=str(tmp_path), steps=1)
    assert seen == {"bias": True, "weight": False}
