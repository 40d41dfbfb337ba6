"""transformers loads what we write and computes what the model computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import ROOT, State, Whole, save
from tests.support.fixture_runs import RUNS, batch, llama_config
from tests.support.foreign_reading import checkpoint_fixture
from ucp_core.conversion import convert
from ucp_core.formats import open_source, warnings_of
from ucp_core.formats.huggingface import writer as huggingface_writer
from ucp_core.geometry import TensorKey
from ucp_core.inspection import diff
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

MEMORY = 8 << 20
IDS = torch.arange(24).reshape(2, 12) % 61


def _model(*, tied: bool) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS).loss)


def _checkpoint(model: Any, *, tied: bool) -> Checkpoint:
    """Return what a run of three ranks would have saved: weights and a moment of each."""
    state: State = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().contiguous()
        data = tensor.numpy().tobytes()
        for slot in ("weight", "exp_avg"):
            key = TensorKey(name, slot)
            state[key] = Whole(dtype="F32", shape=tuple(tensor.shape), data=data)
    store = MemoryStore()
    save(store, state, step=7, world_size=3)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    manifest = replace(
        opened.manifest,
        ties={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        extra={"huggingface": {"config.json": json.loads(model.config.to_json_string())}},
    )
    return replace(opened, manifest=manifest)


@pytest.mark.parametrize("keep_tied", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10_000, 5_000_000_000], ids=["many files", "one file"])
def test_a_model_loads_and_has_the_same_loss(
    tmp_path: Path, *, tied: bool, keep_tied: bool, shard_bytes: int
) -> None:
    """From the shards of three ranks, with and without tied embeddings, in one file or many."""
    model = _model(tied=tied)

    huggingface_writer.write(
        _checkpoint(model, tied=tied),
        LocalStore(),
        str(tmp_path),
        memory_bytes=MEMORY,
        shard_bytes=shard_bytes,
        keep_tied=keep_tied,
    )

    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert _loss(loaded) == _loss(model)


def test_a_model_in_bfloat16_is_the_one_torch_would_cast(tmp_path: Path) -> None:
    """A rounding of our own would be a model of our own."""
    model = _model(tied=True)

    huggingface_writer.write(
        _checkpoint(model, tied=True),
        LocalStore(),
        str(tmp_path / "ours"),
        memory_bytes=MEMORY,
        dtype="bf16",
    )

    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for name in ("ours", "theirs")
    )
    assert ours.dtype == theirs.dtype == torch.bfloat16
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    assert _loss(ours) == _loss(theirs)


def test_what_a_model_class_keeps_in_float32_stays(tmp_path: Path) -> None:
    """The bias of a router decides between experts by differences that bfloat16 does not have."""
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    gate = "model.layers.1.mlp.gate"
    bias_name = f"{gate}.e_score_correction_bias"
    bias = model.get_buffer(bias_name)
    bias.copy_(6.9 + 0.01 * torch.arange(8))
    model.save_pretrained(tmp_path / "source")
    source = open_source(LocalStore(), str(tmp_path / "source"))

    target = str(tmp_path / "bf16")
    huggingface_writer.write(source, LocalStore(), target, memory_bytes=MEMORY, dtype="bf16")
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(target)

    assert torch.equal(found.get_buffer(bias_name), bias)
    assert found.get_parameter(f"{gate}.weight").dtype == torch.float32
    assert found.lm_head.weight.dtype == torch.bfloat16
    assert warnings_of(source, format="huggingface", dtype="bf16") == [
        f"{bias_name}, {gate}.weight stay float32 (DeepseekV3ForCausalLM keeps them in float32)"
    ]
    assert warnings_of(source, format="huggingface", dtype="fp32") == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_wide_is_what_transformers_loads_wide(tmp_path: Path, dtype: str) -> None:
    """One list of a class counts for float16 only: T5 overflows there, and not in bfloat16."""
    shape = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    config = transformers.T5Config(**shape, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    source = open_source(LocalStore(), str(tmp_path / "source"))
    target = tmp_path / "cast"

    huggingface_writer.write(source, LocalStore(), str(target), memory_bytes=MEMORY, dtype=dtype)

    ours = load_file(target / "model.safetensors")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "source", dtype=getattr(torch, dtype)
    ).state_dict()
    assert {name: theirs[name].dtype for name in ours} == {n: t.dtype for n, t in ours.items()}
    wide = [name for name, tensor in ours.items() if tensor.dtype == torch.float32]
    assert all(".wo." in name for name in wide)
    assert len(wide) == (2 if dtype == "float16" else 0)


def test_what_transformers_wrote_goes_through_a_universal_checkpoint(tmp_path: Path) -> None:
    """In at its end, out at ours, and in again."""
    model = _model(tied=True)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    source = open_source(LocalStore(), str(tmp_path / "theirs"))
    assert source.manifest.ties == {"lm_head.weight": "model.embed_tokens.weight"}

    convert(source, LocalStore(), str(tmp_path / "universal"), memory_bytes=MEMORY, processes=1)
    universal = open_checkpoint(LocalStore(), str(tmp_path / "universal"))
    assert diff(source, universal).equal
    huggingface_writer.write(universal, LocalStore(), str(tmp_path / "ours"), memory_bytes=MEMORY)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert _loss(loaded) == _loss(model)
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == theirs


def test_our_universal_checkpoint_opens_as_it_lies(tmp_path: Path) -> None:
    """Its weights are a folder of safetensors with an index; only the configuration is missing."""
    model = _model(tied=False)
    source = _checkpoint(model, tied=False)
    convert(source, LocalStore(), str(tmp_path), memory_bytes=MEMORY, processes=1)
    (tmp_path / "config.json").write_text(model.config.to_json_string())

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    assert _loss(loaded) == _loss(model)


@pytest.mark.parametrize(("name", "num_heads"), RUNS)
def test_a_run_of_another_framework_goes_on_in_transformers(
    tmp_path: Path, name: str, num_heads: int
) -> None:
    """FSDP2, ZeRO and tensor parallel saved it; the loss is that of their own next step."""
    folder = checkpoint_fixture(name)
    report = json.loads((folder / "README.json").read_text())["report"]
    source = open_source(LocalStore(), str(folder / "checkpoint"))
    huggingface_writer.write(source, LocalStore(), str(tmp_path), memory_bytes=MEMORY)
    config = llama_config(source, num_heads)
    config.save_pretrained(tmp_path)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = batch(report, len(report["losses_before"]), config.vocab_size)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    assert float(loss) == pytest.approx(report["losses_after"][0], abs=2e-6)
