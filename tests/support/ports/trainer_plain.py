"""Fine-tune a small causal language model with Hugging Face's Trainer."""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_samples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return samples with prompts of different lengths, which count for no loss."""
    tokens = torch.randint(61, (number, 12), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = tokens[:, ::2]
    labels = tokens.clone()
    for row in range(number):
        labels[row, : 1 + row % 5] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


def make_trainer(kind: Any, directory: str, **given: Any) -> Any:
    chosen = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 3, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", **given,
    }  # fmt: skip
    return kind(
        model=make_model(),
        args=TrainingArguments(output_dir=directory, **chosen),
        train_dataset=make_samples(8, 1),
        eval_dataset=make_samples(16, 2),
    )


if __name__ == "__main__":
    make_trainer(Trainer, sys.argv[1], max_steps=12).train()
