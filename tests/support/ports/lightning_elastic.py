"""Classify points with a LightningModule."""

from collections.abc import Iterable

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from everstep import DataLoader, Session, run

STEPS, BATCH, ACCUMULATION = 60, 4, 4


def make_points(number: int, seed: int) -> TensorDataset:
    points = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) > 1).long())


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        points, labels = batch
        return functional.cross_entropy(self.net(points), labels)

    def validation_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        points, labels = batch
        return functional.cross_entropy(self.net(points), labels)

    def configure_optimizers(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)


TRAIN, HELD_OUT = DataLoader(make_points(640, 1)), make_points(64, 2)


def train(session: Session) -> None:
    model = session.model(Classifier)
    for name in ("training_step", "validation_step"):
        register_fsdp_forward_method(model, name)
    optimizer = session.optimizer(lambda named: model.configure_optimizers(named.values()))
    scheduler = session.register("scheduler", CosineAnnealingLR(optimizer, STEPS))
    logger = CSVLogger("logs", version=session.step) if session.rank == 0 else None
    for step in session.steps(TRAIN):
        session.train_step(lambda batch: model.training_step(batch, 0))
        scheduler.step()
        metrics = {"train_loss": step.loss}
        if step.number % 20 == 0:
            metrics["val_loss"] = session.evaluate(
                lambda ix: (model.validation_step(HELD_OUT[ix], 0), len(ix)), len(HELD_OUT)
            )
        if logger is not None and step.number % 10 == 0:
            logger.log_metrics(metrics, step.number)
            logger.save()


if __name__ == "__main__":
    run(train, steps=STEPS, global_batch=ACCUMULATION * BATCH, micro_batch=BATCH, clip_norm=1.0)
