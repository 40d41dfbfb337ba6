"""Models of ``transformers`` bring their own plans: of tensors, experts, sequences and stages."""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from workers import collectives
from workers.models import Decoder, resolve, tensor_plan
from workers.parallel import (
    Mesh,
    ModelPlan,
    PassHooks,
    Pipeline,
    SequenceParts,
    Stages,
    apply_sequence_plan,
    apply_tensor_plan,
    build_mesh,
    fsdp_modules,
    local_shards,
    materialize,
    own_names,
    shard_model,
)
from workers.train.executor import RankCalls

peft = pytest.importorskip("peft", reason="the extra hf is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
#: The norms of queries and keys of Qwen3 see the heads of one rank. Experts are chosen in float32.
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama": ("Llama", {}, 1e-9),
    "Qwen3": ("Qwen3", {"head_dim": 8}, 1e-9),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}, 1e-6),
    "Qwen3Moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
        1e-6,
    ),
    "adapters": ("Llama", {}, 1e-9),
    "decoder": ("", {}, 1e-9),
    "own plan": ("", {}, 1e-9),
}
#: The hidden layers, by the stages of each rank: two ranks have at least one for each stage.
NUM_LAYERS = {1: 2, 2: 4}
#: With the stages of each rank.
LAYOUTS = [
    (ParallelLayout(tp=2), 1),
    (ParallelLayout(pp=2), 1),
    (ParallelLayout(dp_shard=2, tp=2), 1),
    (ParallelLayout(tp=2, pp=2), 1),
    (ParallelLayout(dp_shard=2, ep=2), 1),
    (ParallelLayout(dp_shard=4, ep=2), 1),
    (ParallelLayout(dp_replicate=2, dp_shard=2, ep=2), 1),
    (ParallelLayout(dp_shard=2, ep=2, tp=2), 1),
    (ParallelLayout(dp_shard=2, ep=2, pp=2), 2),
    (ParallelLayout(pp=2), 2),
    (ParallelLayout(dp_shard=2, pp=2), 2),
    # Two ranks exchange heads, and gather keys and values where one key head is left for both.
    (ParallelLayout(cp=2), 1),
    (ParallelLayout(dp_shard=2, cp=2), 1),
    (ParallelLayout(cp=2, tp=2), 1),
    (ParallelLayout(cp=4), 1),
    (ParallelLayout(cp=2, pp=2), 2),
    (ParallelLayout(dp_shard=2, cp=2, ep=2), 1),
]


def _is_tried(layout: ParallelLayout, kind: str) -> bool:
    """Return whether a kind is cut so: by each way that treats it as it does no other kind.

    Cuts of matrices treat all of them differently. Parts of sequences and stages do that only to
    the decoder, which is not of ``transformers``, and along one axis to adapters. A function of a
    script cuts along two axes.
    """
    if kind == "Mixtral":
        return True
    if kind == "own plan":
        return layout.tp > 1 and layout.world_size == 4 and layout.pp == layout.ep == 1
    if layout.ep > 1:
        return kind == "Qwen3Moe" and layout.pp * layout.cp * layout.dp_replicate == 1
    if layout.world_size == 2:
        return kind == "adapters"
    return kind == "decoder" or (layout.tp > 1 and kind != "Qwen3Moe")


#: A rank's elements of each gradient, and their places in the whole tensor.
Parts = dict[str, list[tuple[tuple[slice, ...], Any]]]

CASES = [
    (layout, per_rank, kind)
    for layout, per_rank in LAYOUTS
    for kind in KINDS
    if _is_tried(layout, kind)
]


def build(kind: str, num_layers: int) -> Any:
    name, more, _ = KINDS[kind]
    if not name:
        shape = resolve("tiny", {"vocab_size": 64, "num_layers": num_layers, "tied": False})
        return Decoder(shape).double()
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{name}Config")(**SIZES, num_hidden_layers=num_layers, **more),
        dtype=torch.float64,
        experts_implementation="eager",
    )
    if kind == "adapters":
        # A cut of rows, one of columns, a matrix that is gathered, a trained copy.
        chosen = peft.LoraConfig(
            r=3,
            target_modules=["q_proj", "down_proj", "embed_tokens"],
            modules_to_save=["lm_head"],
        )
        model = peft.get_peft_model(model, chosen).double()
    return model


def parallelize(model: Decoder, mesh: Mapping[str, DeviceMesh]) -> None:
    """Cut and wrap the layers, as functions of torchtitan do."""
    if "tp" in mesh:
        parallelize_module(model, mesh["tp"], tensor_plan())
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])


def plan_of(kind: str) -> ModelPlan:
    if KINDS[kind][0]:
        return ModelPlan()
    sequence = ("input_ids", "labels")
    if kind == "own plan":
        return ModelPlan(parallelize=parallelize, sequence=sequence)
    return ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage, sequence=sequence)


@functools.cache
def buffers_of(kind: str) -> dict[str, Tensor]:
    return own_names(build(kind, max(NUM_LAYERS)).named_buffers())


def fill(model: nn.Module, kind: str) -> None:
    """Give every parameter a value by its name, whatever part of it is here."""
    buffers = buffers_of(kind)
    with torch.no_grad():
        for name, buffer in own_names(model.named_buffers()).items():
            buffer.copy_(buffers[name])
        for name, parameter in own_names(model.named_parameters()).items():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(parameter.shape, generator=seed, dtype=torch.float64)
            value = value * 0.2 + (1 if "norm" in name else 0)
            if isinstance(parameter, DTensor):
                # Each rank has made all of it: no rank has to send.
                placed = distribute_tensor(
                    value, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(placed.to_local())
            else:
                parameter.copy_(value)


def batches(layout: ParallelLayout, data_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(data_rank)
    num = 4 if layout.pp > 1 else 2  # twice the stages, or the least that are added up
    return [torch.randint(0, 64, (2, 8), generator=generator) for _ in range(num)]


def loss_on(model: Any, tokens: Tensor) -> Tensor:
    """Return the summed loss, and that of the balance of experts in this micro-batch."""
    found = model(input_ids=tokens, use_cache=False) if hasattr(model, "config") else model(tokens)
    logits = getattr(found, "logits", found)[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    balance = getattr(found, "aux_loss", None)
    return loss if balance is None else loss + balance


def loss_of_part(parts: SequenceParts, model: Any, tokens: Tensor) -> Tensor:
    """Return the same of this rank's part of the sequences."""
    # No token sees what is behind it, so the mask of padding there is not needed.
    mask = torch.ones_like(tokens).index_fill_(1, torch.tensor([6, 7]), 0)
    part = parts.of({"input_ids": tokens, "labels": tokens, "attention_mask": mask})
    assert "attention_mask" not in part
    inputs, labels = part["input_ids"], part["labels"]
    if hasattr(model, "config"):
        found = model(input_ids=inputs, position_ids=part["position_ids"], use_cache=False).logits
    else:
        found = model(inputs)
    return nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients_here(model: nn.Module, mesh: Mesh) -> Parts:
    """Return the gradients of this rank's elements, and the boxes where they belong.

    Torch 2.11 makes no whole tensor of parts whose dim two axes cut, such as a fused matrix.
    """
    model.requires_grad_(requires_grad=False)  # what is trained has to be float32
    return {
        shard.fqn: [(tuple(map(slice, *box)), part.numpy()) for box, part in shard.pieces(gradient)]
        for shard in local_shards(model, mesh)
        if (gradient := shard.gradient) is not None
    }


def train(mesh: Mesh, kind: str, per_rank: int) -> Parts:
    """Return the gradients of this rank's stages, added up over micro-batches."""
    num_layers = NUM_LAYERS[per_rank]
    with torch.device("meta"):
        model = build(kind, num_layers)
    names, plan = [name for name, _ in model.named_modules()], plan_of(kind)
    pipeline: Pipeline | None = None
    if mesh.stages is not None:
        stages = Stages(model, plan, mesh.layout.pp, per_rank)
        called = stages.of_rank(mesh.stage, lambda: build(kind, num_layers))
        pipeline = Pipeline(called, stages, mesh=mesh, device=torch.device("cpu"), dtype=None)
        model = called.stages
    for part in (model,) if pipeline is None else model.children():
        apply_tensor_plan(part, mesh, plan, names)
    parts = apply_sequence_plan(model, mesh, plan)
    shard_model(model, mesh, precision="fp32", reshard_after_forward=True)
    materialize(model, torch.device("cpu"))
    if pipeline is not None:
        pipeline.model.share_buffers()
    fill(model, kind)
    given, calls = batches(mesh.layout, mesh.data_rank), RankCalls(model)
    calls.begin()

    def begin_backward(part: nn.Module, number: int) -> None:
        for module in fsdp_modules(part):
            module.set_requires_gradient_sync(number == len(given) - 1, recurse=False)

    loss_here = loss_on if mesh.context is None else functools.partial(loss_of_part, parts)
    if pipeline is not None:
        of_rank = pipeline.model
        hooks = PassHooks(
            begin=lambda *_: None,
            weigh=lambda _, loss: loss,
            begin_backward=lambda stage, number: begin_backward(of_rank.stage(stage), number),
        )
        pipeline.train(given, lambda tokens: loss_here(of_rank, tokens), hooks)
    else:
        for number, tokens in enumerate(given):
            begin_backward(model, number)
            loss_here(model, tokens).backward()
    # transformers asks who the others are, and the results do not depend on them.
    calls.refuse()
    parts.refuse_unused()
    return gradients_here(model, mesh)


def gradients(place: Place) -> dict[tuple[str, int, str], Parts]:
    """Return the gradients of each kind of model, for each layout that this rank is in."""
    found: dict[tuple[str, int, str], Parts] = {}
    for attempt, (layout, per_rank) in enumerate(LAYOUTS, 1):
        if place.rank < layout.world_size:
            collectives.form(**place.formation(attempt, layout.world_size))
            mesh = build_mesh(layout, device_type="cpu", attempt=attempt, rank=place.rank)
            kinds = [kind for *each, kind in CASES if each == [layout, per_rank]]
            found |= {(str(layout), per_rank, kind): train(mesh, kind, per_rank) for kind in kinds}
            collectives.leave()
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what each rank returns; each imports the libraries once for all layouts."""
    with running(gradients, 4, tmp_path_factory.mktemp("ranks")) as ranks:
        return ranks.results()


def alone(kind: str, layout: ParallelLayout, num_layers: int) -> dict[str, Any]:
    """Return the gradients of one process that sees the samples of all ranks."""
    model = build(kind, num_layers)
    fill(model, kind)
    for data_rank in range(layout.dp):
        for tokens in batches(layout, data_rank):
            loss_on(model, tokens).backward()
    named = own_names(model.named_parameters())
    return {name: one.grad.numpy() for name, one in named.items() if one.grad is not None}


@pytest.mark.parametrize(("layout", "per_rank", "kind"), CASES, ids=str)
def test_gradients_are_those_of_one_process(
    layout: ParallelLayout, per_rank: int, kind: str, of_ranks: list[Any]
) -> None:
    """Added up over micro-batches: a sum of sums would count the first one several times."""
    expected = alone(kind, layout, NUM_LAYERS[per_rank])
    missing = {name: np.ones(value.shape, dtype=bool) for name, value in expected.items()}

    for of_rank in of_ranks[: layout.world_size]:
        for name, parts in of_rank[str(layout), per_rank, kind].items():
            atol = KINDS[kind][2] * np.abs(expected[name]).max()
            for at, part in parts:
                np.testing.assert_allclose(part, expected[name][at], 0, atol, err_msg=name)
                missing[name][at] = False
    assert [name for name, elements in missing.items() if elements.any()] == []
