"""The model and the data of the runs that wrote the checkpoints in ``tests/fixtures``."""

from typing import Any

import torch

from ucp_core.native import Checkpoint

#: Fixtures of a Llama with the tensor names of transformers, and its number of attention heads.
RUNS = [
    ("dcp_fsdp4", 3),
    ("ds_zero1_dp2", 3),
    ("ds_zero1_dp2_tied", 3),
    ("ds_zero3_dp2", 3),
    ("ds_tp2_dp2_zero1", 4),
]


def batch(report: dict[str, Any], step: int, vocab: int) -> torch.Tensor:
    """Return the tokens of a step as the run made them: one more than the model sees."""
    generator = torch.Generator().manual_seed(77 * 100003 + step)
    sizes = report["args"]["bs"], report["args"]["seq"] + 1
    ids = torch.randint(0, vocab, sizes, generator=generator)
    # Every second token repeats the one before it.
    ids[:, 1::2] = ids[:, : sizes[1] - 1 : 2]
    return ids


def trained_on(model: Any, optimizer: torch.optim.Optimizer, report: dict[str, Any]) -> list[float]:
    """Train the steps behind the checkpoint as the run did; return their losses."""
    losses = []
    done = len(report["losses_before"])
    for step in range(done, done + len(report["losses_after"])):
        ids = batch(report, step, model.config.vocab_size)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def llama_config(source: Checkpoint, num_heads: int) -> Any:
    """Return the configuration of the run's model; needs transformers."""
    import transformers

    shapes = {e.key.fqn: e.shape for e in source.state_map.entries.values() if len(e.shape) == 2}
    vocab, width = shapes["model.embed_tokens.weight"]
    layer = "model.layers.0"
    return transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=shapes[f"{layer}.mlp.up_proj.weight"][0],
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=shapes[f"{layer}.self_attn.k_proj.weight"][0] * num_heads // width,
        rms_norm_eps=1e-6,
        tie_word_embeddings=bool(source.manifest.ties),
    )
