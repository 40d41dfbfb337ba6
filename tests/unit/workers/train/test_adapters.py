"""A LoRA fine-tune with ``peft``: a frozen base from a checkpoint, and adapters that train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ucp_core
from everstep import RunSettings, Session, Settings, run
from orchestrator.driver import export_run
from workers.settings import CheckpointSettings

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TOKENS = torch.randint(64, (32, 9), generator=torch.Generator().manual_seed(0))


def plain(dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(**CONFIG)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_adapters(dtype: torch.dtype) -> Any:
    lora = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(plain(dtype), lora)


def whole(model: nn.Module) -> dict[str, Tensor]:
    named: Any = model.named_parameters()
    return {name: value.full_tensor().clone() for name, value in named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_train_on_a_frozen_base(tmp_path: Path, dtype: torch.dtype) -> None:
    """The base has its plain names, so any checkpoint of it fits; in bfloat16 it stays that."""
    torch.manual_seed(3)
    base = plain(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    seen: list[dict[str, Tensor]] = []

    def train(name: str, steps: int) -> None:
        def task(session: Session) -> None:
            model = session.model(lambda: with_adapters(dtype))
            session.optimizer(
                lambda named: torch.optim.AdamW([p for p in named.values() if p.requires_grad])
            )
            seen.append(whole(model))

            def loss_of(batch: Any) -> Tensor:
                loss: Tensor = model(input_ids=TOKENS[batch], labels=TOKENS[batch]).loss
                return loss

            for _ in session.steps(len(TOKENS)):
                session.train_step(loss_of)
            seen.append(whole(model))

        start = RunSettings(
            directory="run", init_from=str(tmp_path / "base"), init_missing=("*.lora_*",)
        )
        run(
            task, directory=str(tmp_path / name),
            settings=Settings(run=start, checkpoint=CheckpointSettings(every_steps=1, keep=0)),
            steps=steps, global_batch=4, micro_batch=2, lr=1e-2, warmup_steps=0,
            schedule="constant", precision="bf16" if dtype is torch.bfloat16 else "fp32",
        )  # fmt: skip

    train("whole", 4)
    before, after = seen
    train("resumed", 2)
    train("resumed", 4)

    adapters = {name for name in before if ".lora_" in name}
    prefix = "base_model.model."
    for name, value in base.named_parameters():
        (held,) = (n for n in before if n.replace(".base_layer", "") == prefix + name)
        assert before[held].dtype == dtype
        assert torch.equal(before[held], value.to(dtype))
        assert torch.equal(after[held], before[held])
    assert adapters
    assert not any(torch.equal(before[name], after[name]) for name in adapters)
    results = [
        json.loads((tmp_path / name / "result.json").read_text())["weights_digest"]
        for name in ("whole", "resumed")
    ]
    assert results[0] == results[1]
    entries = ucp_core.open(tmp_path / "whole/checkpoints/step-00000004").state_map.entries
    slots: dict[str, set[str]] = {}
    for key in entries:
        slots.setdefault(key.fqn, set()).add(key.slot)
    q_proj = "model.layers.0.self_attn.q_proj"
    assert slots[f"{q_proj}.weight"] == {"weight"}
    assert slots[f"{q_proj}.lora_A.default.weight"] == {"weight", "exp_avg", "exp_avg_sq"}
    _assert_exported(tmp_path, base, after)


def _assert_exported(directory: Path, base: Any, trained: dict[str, Tensor]) -> None:
    """Assert that ``peft`` makes of an export the model that was trained.

    transformers leaves the adapters in model.safetensors out, as it does not know their names.
    """
    out = directory / "exported"
    export_run(str(directory / "whole"), str(out), format="huggingface", memory_bytes=64 << 20)
    expected = with_adapters(torch.float32)
    expected.load_state_dict({name: value.float() for name, value in trained.items()})
    with torch.no_grad():
        untuned = base.float()(input_ids=TOKENS).logits
        adapted = peft.PeftModel.from_pretrained(base, out).eval()
        tuned = adapted(input_ids=TOKENS).logits
        torch.testing.assert_close(tuned, expected.eval()(input_ids=TOKENS).logits)
    assert not torch.allclose(tuned, untuned)
    # The run may be continued from it, too.
    held = ucp_core.open(directory / "whole/checkpoints/step-00000004").state_map.entries
    weights = {key for key in held if key.slot == "weight"}
    assert ucp_core.open(out).state_map.entries.keys() == weights


def test_a_trained_parameter_is_a_float32_master(tmp_path: Path) -> None:
    def task(session: Session) -> None:
        session.model(lambda: nn.Linear(2, 2, dtype=torch.bfloat16))

    with pytest.raises(Exception, match=r"bfloat16; masters are float32[\s\S]*or freeze it"):
        run(task, directory=str(tmp_path), steps=1, global_batch=4, micro_batch=2)
