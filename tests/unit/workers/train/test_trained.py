"""Which parameters train: saved with each version, restored, and exported."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Session, Settings, TaskError, run
from ucp_core.formats import export
from ucp_core.native import Checkpoint, checkpoint_name, open_checkpoint
from ucp_core.storage import LocalStore, open_store
from workers.settings import CheckpointSettings, TrainSettings

INPUTS = torch.linspace(-1, 1, 64).reshape(16, 4)


class StopError(Exception):
    """The script fails at a chosen place."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.shift


def half_frozen() -> nn.Module:
    model = Tied()
    model.second.requires_grad_(False)
    return model


def checkpoint(directory: Path, step: int) -> Checkpoint:
    store, path = open_store(str(directory))
    return open_checkpoint(store, f"{path}/checkpoints/{checkpoint_name(step)}")


def train(
    directory: Path, *, freeze: str = "build", thaw_at: int = 0, stop_at: int = 0, steps: int = 8
) -> dict[str, Any]:
    """Train; return the weights, and the names of what trained in the first and the last step."""
    found: dict[str, Any] = {}

    def task(session: Session) -> None:
        model = session.model(half_frozen if freeze == "build" else Tied)
        session.optimizer(lambda named: torch.optim.Adam(named.values()))
        if freeze == "script":
            model.second.requires_grad_(False)
        for step in session.steps(len(INPUTS)):
            session.train_step(lambda i: (model(INPUTS[i]) - INPUTS[i]).square().mean())
            if step.number == thaw_at:
                model.second.requires_grad_(True)
            if step.number == stop_at:
                raise StopError
            found["trains"] = [n for n, one in model.named_parameters() if one.requires_grad]
        found["weights"] = {n: p.full_tensor().clone() for n, p in model.named_parameters()}

    settings = Settings(
        train=TrainSettings(steps=steps, global_batch=4, micro_batch=2, lr=0.1),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    with pytest.raises(TaskError, match="StopError") if stop_at else nullcontext():
        run(task, directory=str(directory), settings=settings)
    return found


@pytest.mark.parametrize("freeze", ["build", "script"])
@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_layer_that_was_unfrozen_trains_on_after_a_fault(
    tmp_path: Path, freeze: str, stop_at: int
) -> None:
    """The script unfreezes in the body of step 4 alone, which no later attempt runs again.

    A version of step 4 that is written before the body ends would lose it; and an optimizer
    allocates nothing for what is frozen when it is made.
    """
    whole = train(tmp_path / "whole", freeze=freeze, thaw_at=4)
    train(tmp_path / "cut", freeze=freeze, thaw_at=4, stop_at=stop_at)
    resumed = train(tmp_path / "cut", freeze=freeze, thaw_at=4)
    assert "second.weight" in resumed["trains"]
    for name, value in whole["weights"].items():
        assert torch.equal(value, resumed["weights"][name]), name


def test_a_script_that_now_freezes_other_layers_is_followed(tmp_path: Path) -> None:
    """A person changed the script between two starts: what the version says is of the old one."""
    train(tmp_path, freeze="script", steps=3)
    assert "second.weight" in train(tmp_path, freeze="nothing", steps=6)["trains"]


def test_a_version_says_what_is_frozen_tied_and_a_buffer(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    manifest = checkpoint(tmp_path, 2).manifest
    assert manifest.ties == {"again.weight": "first.weight"}
    assert manifest.roles == {
        "second.bias": "frozen",
        "second.weight": "frozen",
        "shift": "buffer",
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_with_a_frozen_layer_leaves_as_deepspeed(tmp_path: Path, stage: int) -> None:
    """It was refused: a parameter without moments might be one that an export forgot."""
    train(tmp_path / "run", steps=2)
    source = checkpoint(tmp_path / "run", 2)
    target = str(tmp_path / "out")
    export(source, LocalStore(), target, format="deepspeed", stage=stage, memory_bytes=32 << 20)
    if stage == 0:
        return
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    held = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(target)
    assert set(held) == {
        *("first.weight", "first.bias", "second.weight", "second.bias"),
        *("again.weight", "again.bias", "shift"),
    }
