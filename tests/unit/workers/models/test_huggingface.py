"""Causal language models of ``transformers`` train built in, from a folder with their config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import ModelSettings, Settings, TaskError
from tests.support.attempts import settings as small_settings
from tests.support.attempts import write_texts
from ucp_core.storage import open_store
from workers.models import causal_lm, initial_parameter
from workers.parallel.fsdp import _blocks
from workers.protocol import Completed, Raised
from workers.settings import problems
from workers.train.standalone import attempt_alone

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MOE = {"num_experts_per_tok": 2, "output_router_logits": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 48, "tie_word_embeddings": True},
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, **MOE},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8, **MOE},
}


def write_config(folder: Path, kind: str, **more: Any) -> str:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **CONFIGS[kind], **more)
    config.save_pretrained(folder)
    return f"hf:{folder}"


def train(directory: Path, preset: str, data: Any, *, steps: int = 4) -> Any:
    chosen = small_settings(data, steps=steps, warmup_steps=0)
    settings = Settings(
        model=ModelSettings(preset=preset), data=data, train=chosen.train,
        checkpoint=chosen.checkpoint,
    )  # fmt: skip
    assert problems(settings) == []
    store, path = open_store(str(directory))
    return attempt_alone(settings, store, path, attempt=1)


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics/rank0.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_trains_from_its_configuration_alone(tmp_path: Path, kind: str) -> None:
    """Dense or MoE: it learns without a script."""
    preset = write_config(tmp_path / "model", kind)

    outcome = train(tmp_path / "run", preset, write_texts(tmp_path), steps=12)

    assert outcome == Completed(attempt=1, step=12), outcome
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_parameter_begins_by_the_rule_of_the_model(tmp_path: Path, kind: str) -> None:
    """Made one by one, as no rank holds the whole model; norms are ones, matrices are normal."""
    write_config(tmp_path, kind)
    with torch.device("meta"):
        plain = causal_lm(str(tmp_path))
    torch.manual_seed(0)
    whole = causal_lm(str(tmp_path))

    for fqn, expected in whole.named_parameters():
        value = initial_parameter(plain, fqn, seed=1)
        assert value.shape == expected.shape
        assert not value.is_meta
        assert abs(value.mean() - expected.mean()) < 0.01, fqn
        assert abs(value.std() - expected.std()) < 0.2 * expected.std() + 1e-6, fqn
        assert torch.equal(value, initial_parameter(plain, fqn, seed=1))
    name = "model.layers.0.self_attn.q_proj.weight"
    other = initial_parameter(plain, name.replace("0", "1"), seed=1)
    assert not torch.equal(initial_parameter(plain, name, seed=1), other)


def test_training_starts_from_the_weights_of_the_folder(tmp_path: Path) -> None:
    """Also if they are bfloat16; and the first loss is that of the model with these weights."""
    preset = write_config(tmp_path / "model", "Llama")
    data = write_texts(tmp_path)
    train(tmp_path / "new", preset, data, steps=1)
    torch.manual_seed(1)
    model = causal_lm(str(tmp_path / "model")).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    model.save_pretrained(tmp_path / "model")

    train(tmp_path / "tuned", preset, data, steps=1)

    [new], [tuned] = losses(tmp_path / "new"), losses(tmp_path / "tuned")
    assert new < 6.0 < tuned


@pytest.mark.parametrize("kind", CONFIGS)
def test_its_layers_are_the_units(tmp_path: Path, kind: str) -> None:
    """By the classes that the model names, not by containers: experts are in lists, too."""
    write_config(tmp_path, kind)
    with torch.device("meta"):
        model = causal_lm(str(tmp_path))

    units = [name for name, one in model.named_modules() if one in _blocks(model)]

    assert units == ["model.layers.0", "model.layers.1"]


def test_an_impossible_value_is_refused_with_its_key(tmp_path: Path) -> None:
    """Before anything starts; the other sizes would be ignored."""
    write_config(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    model = ModelSettings(preset=f"hf:{tmp_path}", dim=64)
    missing = ModelSettings(preset=f"hf:{tmp_path}/none")

    found = problems(Settings(model=model)) + problems(Settings(model=missing))

    assert [line.partition(":")[0] for line in found] == ["model.dim", *["model.preset"] * 2]
    assert "bytes need 264" in found[1]
    assert "none/config.json cannot be read" in found[2]


def test_weights_of_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    preset = write_config(tmp_path / "model", "Llama")
    other = transformers.GPT2Config(vocab_size=264, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(other).save_pretrained(tmp_path / "other")
    (tmp_path / "other/model.safetensors").rename(tmp_path / "model/model.safetensors")

    outcome = train(tmp_path / "run", preset, write_texts(tmp_path), steps=1)

    assert isinstance(outcome, Raised)
    assert "does not fit the model: it lacks model." in outcome.error
    assert "and has transformer." in outcome.error


def test_a_configuration_that_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"model\.preset: hf:"):
        causal_lm(str(tmp_path))
