"""Three models on a stream, with nearly everything that a script may hand over beside them.

Its argument is the glob of the Parquet files that the stream reads. Alone it takes a run directory
and a number of steps, too.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import IterableDataset

from everstep import CheckpointSettings, DataLoader, ParquetRows, Session, Settings, run

BATCH, MICRO_BATCH, NUM_HELD_OUT, STEPS_MAX = 8, 2, 8, 1_000_000


class Shuffled(IterableDataset[Any]):
    """Rows of files in another order each epoch, with augmentation; continues where it was."""

    def __init__(self, paths: str) -> None:
        self.rows = ParquetRows(paths, columns=["x", "y"])
        self.epoch = self.first = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        self.at, self.first = self.first, 0
        for index in order[self.at :].tolist():
            row = self.rows[index]
            self.at += 1
            yield torch.tensor([row["x"], row["y"]]) + 0.01 * torch.randn(2)


def build_models() -> nn.ModuleDict:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    for block in blocks:
        block.compile(backend="aot_eager")
    student = nn.Sequential(
        spectral_norm(nn.Linear(2, 8)), nn.BatchNorm1d(8), *map(checkpoint_wrapper, blocks),
        nn.Dropout(0.1), nn.Linear(8, 2),
    )  # fmt: skip
    teacher = nn.Linear(2, 2).requires_grad_(False)
    return nn.ModuleDict({"student": student, "critic": nn.Linear(2, 1), "teacher": teacher})


def build_optimizers(named: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    of_student = [p for n, p in named.items() if n.startswith("student.")]
    of_critic = [p for n, p in named.items() if n.startswith("critic.")]
    return [
        torch.optim.AdamW(of_student, lr=0.01),
        torch.optim.SGD(of_critic, lr=0.1, momentum=0.9),
    ]


def loss_of(models: Any, batch: Tensor) -> Tensor:
    student, critic, teacher = models.values()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = student(batch)
    error = (outputs.float() - teacher(batch)).square().mean()
    total: Tensor = error + critic(outputs.float().detach()).square().mean()
    return total


def train(session: Session) -> None:
    models = session.model(build_models, average_buffers=["student.1.running_*"])
    optimizers = session.optimizer(build_optimizers)
    session.register("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    of_student = OneCycleLR(optimizers[0], 0.01, total_steps=STEPS_MAX)
    session.register("schedule", of_student)
    held_out = torch.linspace(-1, 1, 2 * NUM_HELD_OUT).reshape(NUM_HELD_OUT, 2)
    for step in session.steps(LOADER):
        for batch in step.micro_batches():
            step.backward(loss_of(models, batch), tokens=len(batch))
        step.apply()
        of_student.step()
        session.log({"student/lr": of_student.get_last_lr()[0]})
        if step.number % 5 == 0:
            session.evaluate(lambda ix: (loss_of(models, held_out[ix]), len(ix)), NUM_HELD_OUT)
            if session.rank == 0:
                print(f"step {step.number}: {step.loss:.4f}", flush=True)


if __name__ == "__main__":
    LOADER = DataLoader(Shuffled(sys.argv[1]), num_workers=1)
    alone = sys.argv[2:] or ["runs/streamed", "40"]
    run(
        train,
        directory=alone[0],
        settings=Settings(checkpoint=CheckpointSettings(keep=0)),
        steps=int(alone[1]),
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
        warmup_steps=0,
        schedule="constant",
        deterministic=True,
    )
