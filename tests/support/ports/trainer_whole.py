"""A fine-tuning as people write it: metrics, the best model, early stopping, and what follows.

With ``--plain`` it uses Trainer, else it has one import changed. Arguments: a directory for the
trainer, and one for the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from everstep.integrations.transformers import ElasticTrainer
from tests.support.ports.trainer_elastic import make_model

STEPS = 16


def samples(number: int, seed: int) -> list[dict[str, Any]]:
    tokens = torch.randint(61, (number, 12), generator=torch.Generator().manual_seed(seed))
    # Half of each row is alike everywhere: that is learned first, then the rest by heart.
    tokens[:, ::2] = torch.arange(6)
    return [{"input_ids": one, "labels": one} for one in tokens]


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}


def main(kind: Any, directory: str, out: str, **given: Any) -> Any:
    model = make_model()
    trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=directory, max_steps=STEPS, per_device_train_batch_size=2,
            gradient_accumulation_steps=4, learning_rate=2e-2, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
            save_total_limit=2, load_best_model_at_end=True, report_to="none", use_cpu=True,
            disable_tqdm=True, **given,
        ),
        train_dataset=samples(8, 1),
        eval_dataset=samples(9, 2),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(2)],
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
    plain = "--plain" in sys.argv
    main(Trainer if plain else ElasticTrainer, *sys.argv[1:3])
