"""A model of ``transformers`` names its own parts; torch's fake group is the other ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_core.layout import ParallelLayout
from workers.errors import TaskError
from workers.parallel import (
    ModelPlan,
    Stages,
    apply_tensor_plan,
    build_mesh,
    local_shards,
    materialize,
    shard_model,
)

pytestmark = pytest.mark.usefixtures("group")

peft = pytest.importorskip("peft", reason="the extra hf is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def on_meta(kind: str, adapters: dict[str, Any] | None = None, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return peft.get_peft_model(model, peft.LoraConfig(**adapters)) if adapters else model


def cut(model: Any, layout: ParallelLayout, rank: int = 0) -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    mesh = build_mesh(layout, device_type="cpu", attempt=1, rank=rank)
    apply_tensor_plan(model, mesh, ModelPlan(), [name for name, _ in model.named_modules()])
    shard_model(model, mesh, precision="fp32", reshard_after_forward=True)
    materialize(model, torch.device("cpu"))
    return {shard.fqn: shard for shard in local_shards(model, mesh)}


def test_a_fused_weight_of_experts_is_cut_in_each_of_its_parts() -> None:
    """Rows of gates and rows of ups: a rank has a slice of each, of the experts of its shard."""
    model = on_meta("Mixtral", num_local_experts=4, tie_word_embeddings=True)

    shards = cut(model, ParallelLayout(dp_shard=2, tp=2), rank=3)

    fused = shards["model.layers.0.mlp.experts.gate_up_proj"]
    assert [(box.start, box.stop) for box in fused.boxes] == [
        ((2, 24, 0), (4, 48, 32)),
        ((2, 72, 0), (4, 96, 32)),
    ]
    assert fused.replicas == (3,)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert shards["model.embed_tokens.weight"].local.shape == (16, 32)
    assert shards["model.norm.weight"].replicas == (2, 3)


def test_a_rank_has_its_experts_and_a_shard_of_all_the_rest() -> None:
    """Each has a half of the experts; tensor parallelism leaves these whole, and shards them."""
    model = on_meta("Mixtral", num_local_experts=8, tie_word_embeddings=True)

    shards = cut(model, ParallelLayout(dp_replicate=2, dp_shard=4, ep=2, tp=2), rank=9)

    experts = shards["model.layers.0.mlp.experts.gate_up_proj"]
    assert [(box.start, box.stop) for box in experts.boxes] == [((1, 0, 0), (2, 96, 32))]
    assert experts.replicas == (1, 9)
    assert shards["model.layers.0.self_attn.q_proj.weight"].boxes[0].start == (16, 0)
    assert shards["model.layers.0.mlp.gate.weight"].replicas == (0, 1, 8, 9)


def test_a_vocabulary_that_is_not_divided_stays_whole() -> None:
    shards = cut(on_meta("Llama", vocab_size=61, tie_word_embeddings=False), ParallelLayout(tp=2))

    assert shards["lm_head.weight"].replicas == (0, 1)
    assert shards["model.embed_tokens.weight"].local.shape == (61, 32)
    assert shards["model.layers.0.mlp.up_proj.weight"].local.shape == (24, 32)


@pytest.mark.parametrize(
    ("kind", "adapters", "more", "told"),
    [
        (
            "Llama", None, {},
            r"tp=4 does not divide the 2 heads of .*\.self_attn\.k_proj, .*; write parallel\.tp: 2",
        ),
        (
            "Llama", None, {"num_key_value_heads": 4, "intermediate_size": 50},
            r"tp=4 does not divide dim 1 of .*0\.mlp\.down_proj\.weight .*; write parallel\.tp: 2",
        ),
        (
            "Llama", {"target_modules": ["k_proj"], "use_dora": True}, {"num_key_value_heads": 4},
            r"tp=4: .*k_proj\.lora_magnitude_vector\.default of peft cannot be cut",
        ),
        ("GPT2", None, {}, r"tp=4: model GPT2LMHeadModel has no plan .* parallel\.tp: 1"),
    ],
)  # fmt: skip
def test_a_model_that_tensor_parallelism_cannot_cut_is_refused_with_what_works(
    kind: str, adapters: dict[str, Any] | None, more: dict[str, Any], told: str
) -> None:
    """A rank with half of an attention head would fail in a view of the first forward pass."""
    with pytest.raises(TaskError, match=told):
        cut(on_meta(kind, adapters, **more), ParallelLayout(tp=4))


@pytest.mark.parametrize(
    ("kind", "adapters", "more", "told"),
    [
        (
            "Mixtral", None, {"num_local_experts": 6},
            r"ep=4 does not divide the 6 experts of .*\.0\.mlp\.experts; write parallel\.ep: 2",
        ),
        (
            "Mixtral", {"target_parameters": ["mlp.experts.down_proj"]}, {},
            r"ep=4: .*mlp\.experts\.lora_A\.default of peft cannot .* write parallel\.ep: 1",
        ),
        ("Llama", None, {}, r"ep=4: model LlamaForCausalLM has no experts .* parallel\.ep: 1"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_cut_are_refused_with_what_works(
    kind: str, adapters: dict[str, Any] | None, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        cut(on_meta(kind, adapters, **more), ParallelLayout(dp_shard=4, ep=4))


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("Llama", {}, "more than the 2 layers of model LlamaForCausalLM; write parallel.pp: 2"),
        (
            "Mixtral", {"num_hidden_layers": 3, "output_router_logits": True},
            r"balancing loss of model MixtralForCausalLM \(router_aux_loss_coef=0.001\) needs",
        ),
        (
            "Llama", {"num_hidden_layers": 3, "tie_word_embeddings": True},
            "are one parameter on stages 0, 2; untie them .*tie_word_embeddings=False",
        ),
        ("GPT2", {"num_hidden_layers": 3}, "parallel.pp=3: model GPT2LMHeadModel has no plan"),
    ],
)  # fmt: skip
def test_a_model_that_has_no_stages_is_refused_with_what_works(
    kind: str, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        Stages(on_meta(kind, **{"tie_word_embeddings": False, **more}), ModelPlan(), 3)


def test_more_stages_than_layers_are_refused_with_how_many_a_worker_may_have() -> None:
    model = on_meta("Llama", num_hidden_layers=5, tie_word_embeddings=False)
    with pytest.raises(
        TaskError,
        match=r"parallel.pp=2 with parallel.stages_per_worker=3 is more stages than the 5 layers "
        "of model LlamaForCausalLM; write parallel.stages_per_worker: 2",
    ):
        Stages(model, ModelPlan(), 2, 3)


def test_a_stage_goes_on_from_what_it_receives_and_not_from_embeddings() -> None:
    """This model scales embeddings in its forward pass, which only the first stage may do."""
    model = on_meta("Granite", embedding_multiplier=3.0, tie_word_embeddings=False)
    stages = Stages(model, ModelPlan(), 2)
    whole, first, second = (type(model)(model.config) for _ in range(3))
    for number, stage in enumerate((first, second)):
        stage.load_state_dict(whole.state_dict())
        stages.keep(stage, number)
    tokens = torch.arange(12).reshape(2, 6)
    padding = torch.ones(2, 6).index_fill(1, torch.tensor([5]), 0)
    embedded = whole.get_input_embeddings()(tokens).detach()
    for first_input in ({"input_ids": tokens}, {"inputs_embeds": embedded}):
        given = {**first_input, "attention_mask": padding, "labels": tokens}

        between = first(**given)
        found = second(between, **given)
        ((described,),) = stages.described(0, [], given, None)[1:]

        assert described.shape == between.shape
        assert found.loss == whole(**given).loss
