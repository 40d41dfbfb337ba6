"""A tiny model with experts, for runs of ``model.preset: hf:FOLDER``."""

from pathlib import Path

import pytest


def with_experts(folder: Path) -> str:
    """Save its configuration; return the preset. Its loss has that of the experts' balance."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    transformers.MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    ).save_pretrained(folder)
    return f"hf:{folder}"
