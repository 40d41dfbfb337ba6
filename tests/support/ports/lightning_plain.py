"""Classify points with a LightningModule."""

from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

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
        loss = functional.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        points, labels = batch
        loss = functional.cross_entropy(self.net(points), labels)
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=1.0,
        val_check_interval=20 * ACCUMULATION,
        log_every_n_steps=10,
        logger=CSVLogger("logs"),
    )
    train = DataLoader(make_points(640, 1), BATCH, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(make_points(64, 2), BATCH))


if __name__ == "__main__":
    main()
