"""A training script with a scheduler of torch's, an average of its own, buffers, and a loader."""

import torch
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import CosineAnnealingLR

from everstep import DataLoader, Session, run

LOADER = DataLoader(torch.linspace(-1, 1, 64).reshape(32, 2), num_workers=1)


class Average:
    def __init__(self) -> None:
        self.loss = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        spectral_norm(torch.nn.Linear(2, 4)), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def train(session: Session) -> None:
    model = session.model(build_model, average_buffers=["1.running_*"])
    optimizer = session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    scheduler = session.register("scheduler", CosineAnnealingLR(optimizer, 40))
    average = session.register("average", Average())
    for step in session.steps(LOADER):
        session.train_step(lambda batch: functional.mse_loss(model(batch), batch.flip(1)))
        scheduler.step()
        average.loss = 0.9 * average.loss + 0.1 * step.loss
        if session.rank == 0:
            buffers = [float(one.double().sum()).hex() for one in model.buffers()]
            print(f"average {step.number} {average.loss:.12f} {buffers}")


if __name__ == "__main__":
    run(train, steps=40, global_batch=8, micro_batch=2)
