"""State that a script keeps beside the session in local variables, and would lose in a fault."""

from __future__ import annotations

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
    for step in session.steps(len(INPUTS)):
        session.train_step(lambda i: (model(INPUTS[i]) - INPUTS[i]).square().mean())
        for name, one in named.items():
            ema[name].lerp_(one.detach(), 0.1)
            replaced[name] = replaced[name] * 0.9 + one.detach() * 0.1
        total += step.loss
        registered.add_(1.0)
        noise = torch.full((2,), step.loss)
        losses.append(noise)
    assert table[1] == 1
    assert len(views) + len(losses) > 0


def test_what_changes_in_place_is_told_once_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most that a loop holds is made again in each step, is saved, or never changes."""
    with caplog.at_level(logging.WARNING):
        run(train, directory=str(tmp_path), steps=6, global_batch=4, micro_batch=2)
    told = [one.getMessage() for one in caplog.records if "not registered" in one.getMessage()]
    assert [one.split("`")[1] for one in told] == ["ema", "replaced", "total"]
    assert "session.average" in told[0]
