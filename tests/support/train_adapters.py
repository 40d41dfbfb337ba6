"""A LoRA fine-tune of a small model of the hub, on documents that are packed into rows.

Its arguments are the folder of the model, the glob of the documents and the folder of their index.
"""

import sys
from collections.abc import Mapping
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM

from everstep import DataLoader, JsonLines, Session, pack, run

LENGTH, BATCH, MICRO_BATCH, LR, NUM_HELD_OUT = 16, 8, 2, 0.01, 8


def build_model(base: str) -> nn.Module:
    """Return the base, without its weights, with adapters."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted: nn.Module = peft.get_peft_model(model, lora)
    return adapted


def build_optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=LR)


def lr_factor(step: int) -> float:
    return 1.0 / (1.0 + step / 50)


def rows_of(documents: str, index: str) -> Any:
    return pack(JsonLines(documents, cache=index), LENGTH, cache=index)


def collated(rows: Any, indices: Any) -> Any:
    return default_collate([rows[int(index)] for index in indices])


def loss_of(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the mean loss over the targets, and how many they are."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    targets = batch["labels"][:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets), int((targets != -100).sum())


class Average:
    """A running average of the loss."""

    def __init__(self) -> None:
        self.loss = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


def train(session: Session) -> None:
    base, documents, index = sys.argv[1:]
    rows = rows_of(documents, index)
    model = session.model(lambda: build_model(base))
    optimizer = session.optimizer(build_optimizer)
    scheduler = session.register("scheduler", LambdaLR(optimizer, lr_factor))
    average = session.register("average", Average())
    for step in session.steps(DataLoader(rows, num_workers=1)):
        session.train_step(lambda batch: loss_of(model, batch))
        scheduler.step()
        average.loss = 0.9 * average.loss + 0.1 * step.loss
        session.log({"average": average.loss})
        if step.number % 5 == 0:
            session.evaluate(lambda ix: loss_of(model, collated(rows, ix)), NUM_HELD_OUT)


if __name__ == "__main__":
    run(train, steps=20, global_batch=BATCH, micro_batch=MICRO_BATCH, schedule="constant")
