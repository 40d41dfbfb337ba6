"""State that a script keeps beside the session in local variables, and would lose in a fault."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Session, run

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Kept:
    def __init__(self) -> None:
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])


class Average:
    """An average as many scripts write it, whose writes no version counter of the tensors shows."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [one.detach().clone() for one in model.parameters()]
        self.module = nn.Linear(2, 2)
        self.scale, self.calls = 1.0, 0

    def update(self, model: Any) -> None:
        for mean, one in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(float(one.detach().full_tensor().sum()))
        self.shadow[0].lerp_(next(model.parameters()).detach(), 0.1)


def train(session: Session) -> None:
    model = session.model(lambda: nn.Linear(2, 2))
    session.optimizer(lambda named: torch.optim.Adam(named.values()))
    named = dict(model.named_parameters())
    ema = {name: one.detach().clone() for name, one in named.items()}
    replaced = {name: one.detach().clone() for name, one in named.items()}
    total = torch.zeros(())
    views = [one.detach() for one in named.values()]
    kept = session.register("kept", Kept())
    registered = kept.mean
    table, noise, losses = torch.arange(4.0), torch.zeros(2), []
    average, holder = Average(model), Average(nn.Linear(2, 2))
    seen, best, inner = 0, 9.0, 0
    for step in session.steps(len(INPUTS)):
        session.train_step(lambda i: (model(INPUTS[i]) - INPUTS[i]).square().mean())
        for name, one in named.items():
            ema[name].lerp_(one.detach(), 0.1)
            replaced[name] = replaced[name] * 0.9 + one.detach() * 0.1
        total += step.loss
        registered.add_(1.0)
        average.update(model)
        seen += 1
        holder.calls += 1
        best, inner = min(best, step.loss), 0
        for _ in range(3):
            inner += 1
        noise = torch.full((2,), step.loss)
        losses.append(noise)
    assert table[1] == 1
    assert len(views) + len(losses) + seen + best + inner > 0


def test_a_value_that_changes_in_place_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most that a loop holds is made again in each step, is saved, or never changes."""
    with caplog.at_level(logging.WARNING):
        run(train, directory=str(tmp_path), steps=6, global_batch=4, micro_batch=2)
    told = [one.getMessage() for one in caplog.records if "not registered" in one.getMessage()]
    names = [one.split("`")[1] for one in told]
    assert names[:3] == ["ema", "replaced", "total"]
    assert names[3:] == ["average.shadow", "average.module", "seen", "calls"]
    assert "session.average" in told[0]
