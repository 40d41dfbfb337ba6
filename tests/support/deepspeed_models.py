"""Shared by scripts that run real DeepSpeed: models, their cuts, the parts of a rank."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

# The first engine imports it, and with it what compiles: a second of a processor in each rank.
import deepspeed.runtime.zero.muon.muon_optimizer
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

VOCABULARY, WIDTH, NUM_EXPERTS = 11, 6, 4
#: Divides by every number of ranks that is used.
GLOBAL_BATCH = 12
SLOTS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "plain sgd": (),
    "adagrad": ("sum",),
}

#: How ``Parallel`` is cut, and along which dim its shards are put together.
TENSOR_PARALLEL = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*(up|gate)\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    }
}
CUT_DIMS = {"up.weight": 0, "up.bias": 0, "gate.weight": 0, "down.weight": 1}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class Whole(nn.Module):
    """Tied, frozen, buffered, with a parameter of one element; no size divides by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.down = nn.Linear(7, WIDTH)
        self.gain = nn.Parameter(torch.rand(1) + 1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        # Changes at every forward pass and takes part in it.
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale += 0.125
        hidden = self.norm(self.up(self.embed(tokens)))
        scale = self.gain * self.scale.mean().to(self.gain.dtype)
        hidden = self.down(torch.relu(hidden + self.frozen(hidden))) * scale
        return mean_loss(self.head(hidden), labels)


class Parallel(nn.Module):
    """Layers that DeepSpeed cuts over tensor parallel ranks, one of them frozen."""

    def __init__(self, *, biased: bool, inner: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner, bias=biased)
        self.gate = nn.Linear(WIDTH, inner, bias=False)
        self.gate.weight.requires_grad_(False)
        self.down = nn.Linear(inner, WIDTH, bias=biased)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.down(torch.relu(self.up(hidden)) * self.gate(hidden))
        return mean_loss(self.head(hidden), labels)


class Gated(nn.Module):
    """An expert as those of Mixtral, Qwen3-MoE and DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 5, bias=False)
        self.up_proj = nn.Linear(WIDTH, 5, bias=False)
        self.down_proj = nn.Linear(5, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: torch.Tensor = self.down_proj(gated)
        return output


class Experts(nn.Module):
    """With a layer of four experts, which each rank of ``ep`` has some of.

    Args:
        balance: Weight of the loss that balances them; 0 for one that depends on tokens alone.
    """

    def __init__(self, ep: int = 2, *, balance: float = 0.01) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        # Which tokens are dropped depends on the ranks' batches.
        options = {"k": 1, "min_capacity": 0, "drop_tokens": balance > 0}
        self.moe = MoE(WIDTH, Gated(), num_experts=NUM_EXPERTS, ep_size=ep, **options)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.balance = balance

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, loss, _ = self.moe(self.norm(self.embed(tokens)))
        total: torch.Tensor = mean_loss(self.head(hidden), labels) + self.balance * loss
        return total


class Embedding(nn.Module):
    """One weight for both ends of a pipeline; ``logits`` uses it at the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = nn.functional.embedding(tokens, self.weight)
        return rows


def logits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, module.weight)


def sequence_ranks(case: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's argument for sequence parallel ranks, if there are any."""
    if "sp" not in case:
        return {}
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(case["sp"])
    return {"mpu": parallel_state_sp}


def state_of(engine: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor of the training state that this rank's stage has, by ``name/slot``."""
    stage = case["stage"]
    found: dict[str, torch.Tensor] = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8 links the state of all groups after the first group's first step, when
        # the others have none yet; asking for it needs another time.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                found[f"{name}/frozen"] = parameter.detach().float().clone()
        elif stage > 0 and not getattr(parameter, "ds_numel", parameter.numel()):
            # DeepSpeed keeps nothing of what a tensor parallel rank has nothing of.
            slots = ("weight", *SLOTS[case.get("optimizer", "adam")])
            found |= {f"{name}/{slot}": parameter.detach().float().clone() for slot in slots}
        elif stage > 0 or hasattr(engine.optimizer, "bf16_groups"):
            found[f"{name}/weight"] = safe_get_full_fp32_param(parameter).clone()
            for slot in SLOTS[case.get("optimizer", "adam")]:
                value = safe_get_full_optimizer_state(parameter, slot)
                found[f"{name}/{slot}"] = value.detach().float().clone()
        elif case.get("dtype", "fp32") == "fp32":
            found |= _held(name, parameter, engine.optimizer.state[parameter])
        else:
            found |= _held_by_fp16_optimizer(engine.optimizer, name, parameter)
    for name, buffer in engine.module.named_buffers():
        found[f"{name}/buffer"] = buffer.float().clone()
    return {key: value.contiguous() for key, value in found.items()}


def _held(name: str, weight: torch.Tensor, slots: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"{name}/{slot}": v.clone() for slot, v in slots.items() if torch.is_tensor(v)}
    found.pop(f"{name}/step", None)
    return {f"{name}/weight": weight.detach().clone(), **found}


def _held_by_fp16_optimizer(optimizer: Any, name: str, parameter: Any) -> dict[str, torch.Tensor]:
    """Return the master and the slots of a parameter in half precision without ZeRO."""
    if hasattr(optimizer, "fp32_groups_flat"):
        return _held_by_flat_optimizer(optimizer, name, parameter)
    for models, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for model, master in zip(models, masters, strict=True):
            if model is parameter:
                return _held(name, master, optimizer.optimizer.state[master])
    msg = f"no master of {name}"
    raise ValueError(msg)


def _held_by_flat_optimizer(optimizer: Any, name: str, parameter: Any) -> dict[str, torch.Tensor]:
    for models, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        start = 0
        for model in models:
            part = slice(start, start + model.numel())
            start = part.stop
            if model is parameter:
                state = optimizer.optimizer.state[flat].items()
                slots = {k: v[part].view_as(model) for k, v in state if k in SLOTS["adam"]}
                return _held(name, flat[part].view_as(model), slots)
    msg = f"no master of {name}"
    raise ValueError(msg)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of one tensor parallel group, whose ranks are neighbours."""
    return {
        key: torch.cat([part[key] for part in parts], dim=CUT_DIMS[key.split("/")[0]]).contiguous()
        if key.split("/")[0] in CUT_DIMS
        else value
        for key, value in parts[0].items()
    }


def with_all_experts(parts: list[dict[str, torch.Tensor]], ep: int) -> dict[str, torch.Tensor]:
    """Return the tensors of all ranks, experts by their numbers in the whole layer."""
    found: dict[str, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        for key, value in part.items():
            prefix, dot, rest = key.partition("deepspeed_experts.")
            name = key
            if dot:
                number, rest = rest.split(".", 1)
                name = f"{prefix}{dot}{NUM_EXPERTS // ep * (rank % ep) + int(number)}.{rest}"
            found.setdefault(name, value)
    return found


def run_job(run: Callable[[dict[str, Any], Path], None]) -> None:
    """Run every case of the job that the command line names."""
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    # Without this operator all-reduces go through gloo; with it, DeepSpeed first compiles C++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in job:
        # An engine leaves its parallel state behind, which the next one takes for its own.
        groups.mpu = None
        run(case, out)
    dist.barrier()
    dist.destroy_process_group()
    # All is written. torch's threads can abort a process on its way out (seen under load).
    sys.stdout.flush()
    os._exit(0)
