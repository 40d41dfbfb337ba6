"""The built-in training: a language model on text, written like any training script."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.data import Split, open_texts
from workers.errors import DataError
from workers.models import (
    Decoder,
    causal_lm,
    causal_lm_loss,
    initial_parameter,
    initial_value,
    tensor_plan,
)
from workers.parallel import ModelPlan
from workers.settings import TrainSettings, model_shape
from workers.train.session import Session

#: The mean loss of a model on a batch, which has the next token of each as ``shift_labels``.
_Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def train_language_model(session: Session) -> None:
    """Train the model of ``session.settings`` on its data to the last step."""
    settings = session.settings
    texts = open_texts(settings.data)
    make = _from_folder if settings.model.folder else _decoder
    model, vocab_size, loss = make(session)
    if texts.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {texts.vocab_size} tokens, more than the model's vocab_size="
            f"{vocab_size}; set model.vocab_size, or use the tokenizer of the model"
        )
    session.optimizer(lambda parameters: adamw(parameters, settings.train))

    def loss_on(split: Split, samples: NDArray[Any]) -> tuple[Tensor, int]:
        inputs, targets = (
            torch.from_numpy(array).to(session.device) for array in split.batch(samples)
        )
        batch = session.part({"input_ids": inputs, "shift_labels": targets})
        return loss(model, batch), batch["shift_labels"].numel()

    def validate() -> None:
        num_held_out = min(settings.data.validation_samples, texts.held_out.num_samples)
        session.evaluate(lambda samples: loss_on(texts.held_out, samples), num_held_out)

    train, measured = settings.train, -1
    for step in session.steps(texts.train.num_samples, data_digest=texts.digest):
        session.train_step(lambda samples: loss_on(texts.train, samples))
        due = train.validation_every and step.number % train.validation_every == 0
        if due or step.number == train.steps:
            # In the body, so that the value belongs to the step's version.
            validate()
            measured = step.number
    if measured != session.step:
        validate()


def _decoder(session: Session) -> tuple[Any, int, _Loss]:
    """Return the reference decoder, its number of token ids, and its loss."""
    shape, seed = model_shape(session.settings.model), session.settings.train.seed

    def initialise(fqn: str, size: tuple[int, ...]) -> Tensor:
        return initial_value(fqn, size, seed=seed, num_layers=shape.num_layers)

    plan = ModelPlan(
        tensor=tensor_plan(),
        keep_stage=Decoder.keep_stage,
        sequence=("input_ids", "shift_labels"),
    )
    model = session.model(lambda: Decoder(shape), initialise, plan=plan)

    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(batch["input_ids"], targets_BT=batch["shift_labels"])
        return loss

    return model, shape.vocab_size, loss


def _from_folder(session: Session) -> tuple[Any, int, _Loss]:
    """Return the Hugging Face model in ``model.folder``, its number of token ids, and its loss."""
    folder, seed = session.settings.model.folder, session.settings.train.seed
    with torch.device("meta"):
        plain = causal_lm(folder)
    vocab_size: int = plain.config.get_text_config().vocab_size

    def initialise(fqn: str, _size: tuple[int, ...]) -> Tensor:
        return initial_parameter(plain, fqn, seed=seed)

    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        places = batch.get("position_ids")
        return causal_lm_loss(model, batch["input_ids"], batch["shift_labels"], places)

    return session.model(lambda: causal_lm(folder), initialise), vocab_size, loss


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
