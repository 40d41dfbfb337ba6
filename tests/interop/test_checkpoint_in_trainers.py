"""``everstep.checkpoint`` in Accelerate and Lightning, as the guide says."""

import re
from pathlib import Path

import pytest

from tests.arch.tree import ROOT
from tests.support.forking import run_script

pytestmark = pytest.mark.interop

PAGE = (ROOT / "workers/guide/checkpoints.md").read_text(encoding="utf-8")
ACCELERATE = """
from pathlib import Path

import torch
from accelerate import Accelerator

from everstep import checkpoint

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def train() -> torch.Tensor:
    accelerator.backward(model(torch.ones(3)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return model.weight.detach().clone()


{block}

train()
accelerator.save_state("state")
expected = train()
train()
accelerator.load_state("state")
assert torch.equal(train(), expected)
assert not [*Path("state").glob("*model*")]
print(checkpoint.newest("state"))
"""
LIGHTNING = """
import shutil
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO
from torch.utils.data import DataLoader

from everstep import checkpoint

warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


{block}


def fit(epochs: int, path: str | None) -> tuple[Model, str]:
    kept, best, model = Kept(), ModelCheckpoint("kept", "last"), Model()
    started = LambdaCallback(setup=kept.setup, on_train_start=kept.start)
    trainer = lightning.Trainer(
        max_epochs=epochs, plugins=[kept], callbacks=[started, best], logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )
    trainer.fit(model, DataLoader(torch.randn(8, 3, generator=made()), 2), ckpt_path=path)
    return model, best.best_model_path


def made() -> torch.Generator:
    return torch.Generator().manual_seed(0)


expected, _ = fit(3, None)
shutil.rmtree("kept")
_, path = fit(2, None)
model, _ = fit(3, path)
assert torch.equal(model.net.weight, expected.net.weight)
print(checkpoint.newest(path))
"""


def block(heading: str) -> str:
    found = re.search(rf"\n## {heading}\n.*?```py\n(.*?)```", PAGE, re.DOTALL)
    assert found, heading
    return found[1]


@pytest.mark.parametrize(
    ("heading", "package", "script", "last"),
    [
        ("Accelerate", "accelerate", ACCELERATE, "state/step-00000001"),
        pytest.param("Lightning", "lightning", LIGHTNING, "step-00000012", marks=pytest.mark.chaos),
    ],
)
def test_a_trainer_continues_where_it_was(
    tmp_path: Path, heading: str, package: str, script: str, last: str
) -> None:
    """To the bit, with optimizer and scheduler; what the trainer writes itself has no weights."""
    pytest.importorskip(package, reason="an extra is not installed: hf or interop")
    path = tmp_path / "train.py"
    path.write_text(script.replace("{block}", block(heading)))

    assert run_script(path, tmp_path).strip().endswith(last)
