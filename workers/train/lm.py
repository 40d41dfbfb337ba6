"""The built-in training: the reference decoder on text, written like any training script."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.data import Split, open_texts
from workers.errors import DataError
from workers.models import Decoder, initial_value, mean_loss, tensor_plan
from workers.parallel import ModelPlan
from workers.settings import TrainSettings, model_shape
from workers.train.session import Session

__all__ = ["train_language_model"]


def train_language_model(session: Session) -> None:
    """Train the decoder of ``session.settings`` on its data to the last step.

    Raises:
        DataError: The data cannot be used with this model.
    """
    settings = session.settings
    shape = model_shape(settings.model)
    texts = open_texts(settings.data)
    if texts.vocab_size > shape.vocab_size:
        raise DataError(
            f"data.tokenizer has {texts.vocab_size} tokens, more than "
            f"model.vocab_size={shape.vocab_size}; set model.vocab_size"
        )

    def initialise(fqn: str, size: tuple[int, ...]) -> Tensor:
        return initial_value(fqn, size, seed=settings.train.seed, num_layers=shape.num_layers)

    plan = ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage)
    # Nothing here changes the logits in place, of which that warns under tensor parallelism.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = session.model(lambda: Decoder(shape), initialise, plan=plan)
    session.optimizer(lambda parameters: adamw(parameters, settings.train))

    def loss_on(split: Split, samples: NDArray[Any]) -> tuple[Tensor, int]:
        inputs, targets = (
            torch.from_numpy(array).to(session.device) for array in split.batch(samples)
        )
        return mean_loss(model(inputs), targets), targets.numel()

    def validate() -> None:
        num_held_out = min(settings.data.validation_samples, texts.held_out.num_samples)
        session.evaluate(lambda samples: loss_on(texts.held_out, samples), num_held_out)

    train = settings.train
    for step in session.steps(texts.train.num_samples, data_digest=texts.digest):
        session.train_step(lambda samples: loss_on(texts.train, samples))
        due = train.validation_every and step.number % train.validation_every == 0
        if due and step.number < train.steps:
            validate()
    validate()


def adamw(parameters: Mapping[str, nn.Parameter], train: TrainSettings) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only; each step sets the learning rate."""
    matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.betas[0], train.betas[1]),
        eps=train.eps,
        foreach=True,
    )
