"""State of a script beside the model: saved with every version, and loaded with it."""

import enum
import math
import random
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, lr_scheduler

from everstep import Session, Settings, TaskError, run
from workers.settings import CheckpointSettings
from workers.state import Registered

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Average:
    """A running average of the loss, as many scripts have one."""

    def __init__(self) -> None:
        self.value = math.inf
        self.seen: dict[int, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.seen = state["value"], state["seen"]


class StopError(Exception):
    """The script fails at a chosen place."""


def train(
    directory: Path, make: Any, *, steps: int = 6, stop_after: int = 0, before_end: bool = False
) -> tuple[list[float], Average]:
    """Train; return the learning rates from the first step on, and the average.

    Args:
        directory: Directory of the run.
        make: Makes the scheduler of an optimizer.
        steps: Steps of the run.
        stop_after: The step in which the script fails: in the body, after ``apply`` and the
            scheduler's step, or once the next step has begun.
        before_end: Fail before the end of the body.
    """
    rates: list[float] = []
    held: list[Average] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        optimizer = session.optimizer(lambda named: SGD(named.values(), lr=0.5, momentum=0.5))
        scheduler = session.register("lr", make(optimizer))
        average = session.register("average", Average())
        held.append(average)
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                if stop_after and step.number > stop_after:
                    raise StopError
                loss = functional.mse_loss(model(INPUTS[samples]), INPUTS[samples])
                step.backward(loss, tokens=len(samples))
            step.apply()
            rates.append(step.lr)
            scheduler.step()
            average.value = min(average.value, step.loss)
            average.seen[step.number] = (step.loss, torch.tensor(step.loss))
            if before_end and step.number == stop_after:
                raise StopError

    settings = Settings(checkpoint=CheckpointSettings(every_steps=1, keep=0))
    fails = pytest.raises(TaskError, match="StopError") if stop_after else nullcontext()
    with fails:
        run(task, directory=str(directory), settings=settings, steps=steps,
            global_batch=4, micro_batch=2)  # fmt: skip
    return rates, held[-1]


SCHEDULERS = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("before_end", [False, True])
def test_schedulers_of_torch_go_on_where_they_were(
    tmp_path: Path, name: str, *, before_end: bool
) -> None:
    """After a fault in the next step, and in the body before the step is saved."""
    undisturbed, average = train(tmp_path / "undisturbed", SCHEDULERS[name])
    first, _ = train(tmp_path / "run", SCHEDULERS[name], stop_after=3, before_end=before_end)
    second, resumed = train(tmp_path / "run", SCHEDULERS[name])

    saved = 2 if before_end else 3
    assert first == undisturbed[:3]
    assert second == undisturbed[saved:]
    assert len(set(undisturbed)) > 1
    assert resumed.state_dict() == average.state_dict()


def test_whatever_small_scripts_keep_comes_back(tmp_path: Path) -> None:
    """States of generators, arrays, keys that are no text."""
    chosen = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(3).bit_generator.state,
        "torch": torch.Generator().manual_seed(3).get_state(),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "kinds": [np.float32(0.1), np.longdouble(3), np.int8(4), Counter("aab"), True, (1, [2])],
        "tags": [{"as": "number", "of": 1}],
        "numbers": {1: np.float32(2.5), None: -math.inf, (1, 2): b"bytes"},
        "words": {"base64": "no bytes", "nested": [{"float": "text"}, {"tuple": [1]}]},
    }
    held = Average()
    held.value = chosen  # type: ignore[assignment]  # any state will do

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: SGD(named.values()))
        found = session.register("held", held if session.step == 0 else Average())
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                step.backward(model(INPUTS[samples]).square().mean(), tokens=1)
            step.apply()
        seen.append(found.value)

    seen: list[Any] = []
    for steps in (1, 2):
        run(task, directory=str(tmp_path), steps=steps, global_batch=4, micro_batch=2)

    torch.testing.assert_close(seen[1].pop("torch"), seen[0].pop("torch"))
    np.testing.assert_equal(seen[1].pop("array"), seen[0].pop("array"))
    assert seen[1].pop("empty").shape == seen[0].pop("empty").shape
    assert seen[1] == seen[0]
    for was, now in zip(seen[0]["kinds"], seen[1]["kinds"], strict=True):
        assert type(now) is type(was)


class Phase(enum.IntEnum):
    """A stage of a curriculum."""

    LONG = 2


class Point(NamedTuple):
    """As many scripts have one."""

    x: int


@pytest.mark.parametrize(
    "value",
    [
        Phase.LONG, Point(1), defaultdict(int), np.ma.zeros(3), nn.Parameter(torch.ones(2)),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]), torch.Size([1]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_come_back_as_another_kind_is_refused(value: Any) -> None:
    with pytest.raises(TaskError, match=r"x\.value\.a .*; state_dict\(\) may hold"):
        Registered(()).add("x", _holding({"a": value}), None)


@pytest.mark.parametrize(
    ("register", "told"),
    [
        (lambda s, _: s.register("x", object()), "needs state_dict"),
        (lambda s, _: [s.register("x", Average()), s.register("x", Average())], "already"),
        (lambda s, _: s.register("x", _holding(print)), "x.value is a builtin"),
        (lambda s, _: s.register("x", _holding(torch.zeros(1 << 20))), "4096|546[0-9] KiB"),
        (
            lambda s, _: s.register("x", SCHEDULERS["cosine"](SGD([torch.zeros(1)]))),
            "another optimizer",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_step(
    tmp_path: Path, register: Any, told: str
) -> None:
    def task(session: Session) -> None:
        session.model(lambda: nn.Linear(2, 2))
        register(session, session.optimizer(lambda named: SGD(named.values())))
        next(session.steps(4))

    with pytest.raises(TaskError, match=told):
        run(task, directory=str(tmp_path), steps=1, global_batch=4, micro_batch=2)


def _holding(value: Any) -> Average:
    average = Average()
    average.value = value
    return average
