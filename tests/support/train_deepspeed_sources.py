"""Trains with real DeepSpeed in many configurations and saves; run by torchrun.

``python -m torch.distributed.run --nproc-per-node N -m tests.support.train_deepspeed_sources JOB
OUT``: JOB is a JSON list of cases, OUT a folder that gets ``<name>.ds``, the checkpoint, and
``<name>.safetensors``, what the training processes held, by ``<fqn>/<slot>``.
"""

import json
from pathlib import Path
from typing import Any

import deepspeed
import safetensors.torch
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from tests.support.deepspeed_models import (
    GLOBAL_BATCH,
    TENSOR_PARALLEL,
    VOCABULARY,
    WIDTH,
    Embedding,
    Experts,
    Parallel,
    Whole,
    joined,
    logits,
    mean_loss,
    run_job,
    sequence_ranks,
    state_of,
    with_all_experts,
)

_FUSED_ADAM = deepspeed.runtime.engine.FusedAdam


class Sequence(nn.Module):
    """A model in which every sequence parallel rank sees a part of each sequence, and attention
    all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(
            _attended, parallel_state_sp.get_sequence_parallel_group(), scatter_idx=2, gather_idx=1
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        heads = [
            part.unflatten(-1, (2, -1)).contiguous() for part in self.mixed(hidden).chunk(3, -1)
        ]
        joined = self.attention(*heads, 0).flatten(2)
        return mean_loss(self.head(hidden + joined), labels)


class Twins(nn.Module):
    """Layers that begin alike, the first ones frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for layer in self.layers[1:]:
            layer.load_state_dict(self.layers[0].state_dict())
        for part in (self.norms[0], self.layers[0]):
            part.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + torch.relu(layer(norm(hidden)))
        return mean_loss(self.head(hidden), labels)


def _attended(*heads: Any) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in heads[:3])
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """A layer of a pipeline with a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(hidden))) * self.frozen
        return hidden + change


def model_of(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1 + (dist.get_rank() if case.get("model") == "experts" else 0))
    if case.get("model") == "pipeline":
        ends = [TiedLayerSpec("ends", Embedding, forward_fn=f) for f in (None, logits)]
        layers = [ends[0], LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.LayerNorm, WIDTH)]
        module: nn.Module = PipelineModule(
            layers=[*layers, ends[1]], num_stages=case["pp"], loss_fn=mean_loss
        )
        return module
    if case.get("model") == "parallel":
        return Parallel(biased=case.get("biased", True), inner=case.get("inner", 10))
    kinds: dict[str, type[nn.Module]] = {"experts": Experts, "sequence": Sequence, "twins": Twins}
    return kinds.get(case.get("model", "whole"), Whole)()


def groups_of(model: nn.Module, case: dict[str, Any]) -> list[dict[str, Any]]:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if case.get("model") == "experts" and not case.get("unsplit", False):
        group = {"params": [p for _, p in trained], "name": "all"}
        found: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(group)
        return found
    if case.get("groups", 2) == 1 or case.get("unsplit", False):
        return [{"params": [p for _, p in trained], "weight_decay": 0.1}]
    cut = [[(n, p) for n, p in trained if (p.ndim > 1) == matrices] for matrices in (True, False)]
    parts: list[list[Any]] = [[pair if case.get("named") else pair[1] for pair in c] for c in cut]
    lr = case.get("lr", 0.01)
    return [
        {"params": parts[0], "weight_decay": 0.1, "lr": lr},
        {"params": parts[1], "weight_decay": 0.0, "lr": 0.4 * lr},
    ]


def optimizer_of(groups: list[dict[str, Any]], kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9 if kind == "sgd" else 0.0)


def build(case: dict[str, Any]) -> Any:
    ranks = sequence_ranks(case)
    # It can on a CPU too, if slowly, and what it saves is the same.
    get_accelerator().is_fp16_supported = lambda: True
    # This one alone gets flat masters; it has to be compiled, and what it saves is the same.
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if case.get("fused") else _FUSED_ADAM
    model = model_of(case)
    groups = groups_of(model, case)
    optimizer = optimizer_of(groups, case.get("optimizer", "adam"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.get("batch", 2),
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": case["stage"],
            "stage3_param_persistence_threshold": case.get("persistence", 0),
            **case.get("zero", {}),
        },
        "steps_per_print": 10**9,
        **case.get("config", {}),
    }
    if case.get("tp", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": case["tp"], **TENSOR_PARALLEL}
    if case.get("dtype", "fp32") != "fp32":
        config[case["dtype"]] = {"enabled": True}
        # A larger scale would overflow in the first steps, and DeepSpeed would skip them.
        config[case["dtype"]] |= {"initial_scale_power": 4} if case["dtype"] == "fp16" else {}
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, **ranks
    )
    return engine


def train(engine: Any, case: dict[str, Any]) -> None:
    sp = case.get("sp", 1)
    rank = dist.get_rank() // case.get("tp", 1) // sp
    for step in range(case.get("steps", 3)):
        batch = torch.Generator().manual_seed(step)
        data = torch.randint(0, VOCABULARY, (2, GLOBAL_BATCH, 4 + sp), generator=batch)
        mine = data[:, 2 * rank : 2 * rank + 2].chunk(sp, -1)[dist.get_rank() % sp]
        mine = mine.contiguous()
        if case.get("model") == "pipeline":
            engine.train_batch(iter([(mine[0], mine[1])]))
            continue
        loss = engine(mine[0], mine[1])
        engine.backward(loss)
        engine.step()


def gathered(mine: dict[str, torch.Tensor], case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors of all stages and ranks."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    if case.get("tp", 1) > 1:
        return joined(held[: case["tp"]])
    return with_all_experts(held, 2)


def run(case: dict[str, Any], out: Path) -> None:
    """Train, save, and tell the state."""
    engine = build(case)
    train(engine, case)
    engine.save_checkpoint(
        str(out / f"{case['name']}.ds"), client_state={"mine": [1, "two"]}, **case.get("save", {})
    )
    tensors = gathered(state_of(engine, case), case)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            out / f"{case['name']}.safetensors",
        )
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
        told = {"groups": groups, "lr_scheduler": engine.lr_scheduler.state_dict()}
        (out / f"{case['name']}.json").write_text(json.dumps(told, default=str))
    engine.destroy()


if __name__ == "__main__":
    run_job(run)
