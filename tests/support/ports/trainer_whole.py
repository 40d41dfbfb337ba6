"""A fine-tuning as people write it: metrics, the best model, early stopping, and what follows.

Arguments: a directory for the trainer, one for the model, and seconds that a step takes at least.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from everstep.integrations.transformers import ElasticTrainer
from tests.support.ports.trainer_elastic import make_model

STEPS = 16


def samples(number: int, seed: int) -> list[dict[str, Any]]:
    """Return sequences that are their own labels."""
    tokens = torch.randint(61, (number, 12), generator=torch.Generator().manual_seed(seed))
    # Half of each row is alike everywhere: that is learned first, then the rest by heart.
    tokens[:, ::2] = torch.arange(6)
    return [{"input_ids": one, "labels": one} for one in tokens]


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of tokens that the one before predicts best."""
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}


class Paced(TrainerCallback):
    """Gives each step time in which a test can do something to it."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait."""
        time.sleep(self._pause_s)


def main(kind: Any, directory: str, out: str, pause_s: str = "0") -> Any:
    """Do all of it."""
    model = make_model()
    trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=directory, max_steps=STEPS, per_device_train_batch_size=2,
            gradient_accumulation_steps=4, learning_rate=2e-2, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
            save_total_limit=2, load_best_model_at_end=True, report_to="none", use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=samples(8, 1),
        eval_dataset=samples(9, 2),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(2), Paced(float(pause_s))],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    found = trainer.evaluate()
    model.eval()
    generated = model.generate(torch.arange(4).unsqueeze(0), max_new_tokens=8, do_sample=False)
    history = [
        {name: line[name] for name in ("step", "eval_loss", "eval_accuracy")}
        for line in trainer.state.log_history
        if "eval_loss" in line
    ]
    results = {
        "history": history,
        "best": [trainer.state.best_global_step, trainer.state.best_metric],
        "last": trainer.state.global_step,
        "evaluated": {name: found[name] for name in ("eval_loss", "eval_accuracy")},
        "generated": generated[0].tolist(),
    }
    Path(out, "results.json").write_text(json.dumps(results))
    with Path(out, "times.txt").open("a") as file:
        file.write("once\n")
    return trainer


if __name__ == "__main__":
    main(ElasticTrainer, *sys.argv[1:])
