"""A training script with several models and optimizers: a GAN with an average and a teacher."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from everstep import DataLoader, Session, run

LOADER = DataLoader(torch.linspace(-1, 1, 64).reshape(32, 2).exp())


def build_models() -> nn.ModuleDict:
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    return nn.ModuleDict(
        {
            "generator": generator,
            "critic": nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1)),
            "average": copy.deepcopy(generator).requires_grad_(False),
            "teacher": nn.Linear(2, 2).requires_grad_(False),
        }
    )


def logits_loss(logits: Tensor, label: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def train(session: Session) -> None:
    models = session.model(build_models)
    generator, critic, average = models["generator"], models["critic"], models["average"]
    of_generator, of_critic = session.optimizer(
        lambda named: [
            torch.optim.AdamW([p for n, p in named.items() if n.startswith("generator.")]),
            torch.optim.SGD([p for n, p in named.items() if n.startswith("critic.")], momentum=0.9),
        ]
    )

    @torch.no_grad()
    def follow(*_: object) -> None:
        for mine, theirs in zip(average.parameters(), generator.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    of_generator.register_step_post_hook(follow)

    def critic_loss(batch: Tensor) -> Tensor:
        made = generator(torch.randn_like(batch)).detach()
        return logits_loss(critic(batch), 1.0) + logits_loss(critic(made), 0.0)

    def generator_loss(batch: Tensor) -> Tensor:
        made = generator(torch.randn_like(batch))
        return logits_loss(critic(made), 1.0) + 0.1 * mse_loss(made, models["teacher"](batch))

    for step in session.steps(LOADER):
        if step.number % 3:
            session.train_step(critic_loss, optimizers=[of_critic])
        else:
            session.train_step(generator_loss, optimizers=[of_generator])


if __name__ == "__main__":
    run(train, steps=12, global_batch=8, micro_batch=2)
