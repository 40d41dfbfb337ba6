"""Trains and loads with real DeepSpeed, several cases in one launch; run by torchrun.

``python -m torch.distributed.run --nproc-per-node N -m tests.support.train_deepspeed JOB OUT``:
JOB is a JSON list of cases, OUT a folder that gets ``<name>.json`` and ``<name>.safetensors``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import safetensors.torch
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import nn

from tests.support import train_deepspeed_pipeline

VOCABULARY, WIDTH = 11, 6
#: Divides by every number of ranks that is used.
GLOBAL_BATCH = 12
SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Model(nn.Module):
    """Tied, frozen, buffered, with a parameter of one element; no size divides by the ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
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
        self.register_buffer("scale", torch.rand(1))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        with torch.no_grad():
            self.scale += 0.125
        hidden = self.norm(self.up(self.embed(tokens)))
        scale = self.gain * self.scale.to(self.gain.dtype)
        hidden = self.down(torch.relu(hidden + self.frozen(hidden))) * scale
        return nn.functional.cross_entropy(
            self.head(hidden).float().view(-1, VOCABULARY), labels.view(-1)
        )


class ParallelModel(nn.Module):
    """Of layers that DeepSpeed can cut over tensor-parallel ranks, a frozen one among them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10, bias=False)
        self.gate = nn.Linear(WIDTH, 10, bias=False)
        self.gate.weight.requires_grad_(False)
        self.down = nn.Linear(10, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.down(torch.relu(self.up(hidden)) * self.gate(hidden))
        return nn.functional.cross_entropy(
            self.head(hidden).float().view(-1, VOCABULARY), labels.view(-1)
        )


#: How ``ParallelModel`` is cut, and along which dim its shards are put together.
TENSOR_PARALLEL = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*(up|gate)\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    }
}
CUT_DIMS = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}
MODELS: dict[str, type[nn.Module]] = {"plain": Model, "parallel": ParallelModel}


def build(case: dict[str, Any], *, seed: int, spoilt: bool) -> Any:
    """Return an engine; a spoilt one has hyper-parameters that a checkpoint has to replace."""
    if "pp" in case:
        return train_deepspeed_pipeline.build(case, seed=seed, spoilt=spoilt)
    model = MODELS[case.get("model", "plain")](seed)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    lr = 0.5 if spoilt else 0.01
    if case.get("groups", 2) == 2:
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": lr},
            {"params": [p for _, p in trained if p.ndim == 1], "weight_decay": 0.0, "lr": lr / 3},
        ]
    else:
        groups = [{"params": [p for _, p in trained], "lr": lr}]
    if spoilt:
        for group in groups:
            group["weight_decay"] = 0.7
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=lr, momentum=0.9)
        if case.get("optimizer") == "sgd"
        else torch.optim.AdamW(groups, betas=(0.8, 0.9) if not spoilt else (0.1, 0.2))
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // data_ranks(case),
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": case["stage"],
            "sub_group_size": case.get("sub_group_size", 10**9),
            "stage3_param_persistence_threshold": case.get("persistence", 0),
        },
        "checkpoint": {"load_universal": case.get("universal", False)},
        "steps_per_print": 10**9,
    }
    if case.get("tp", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": case["tp"], **TENSOR_PARALLEL}
    if case.get("dtype", "fp32") != "fp32":
        config[case["dtype"]] = {"enabled": True}
    ranks: dict[str, Any] = {}
    if "sp" in case:
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(case["sp"])
        ranks["mpu"] = parallel_state_sp
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, **ranks
    )
    return engine


def data_ranks(case: dict[str, Any]) -> int:
    """Return the number of ranks that see samples of their own."""
    return dist.get_world_size() // int(case.get("tp", 1)) // int(case.get("sp", 1))


def train(engine: Any, case: dict[str, Any], first: int, steps: int) -> list[float]:
    """Return the loss of each step over the global batch, which depends on the step alone."""
    if "pp" in case:
        return train_deepspeed_pipeline.train(engine, first, steps)
    sp, world_size = case.get("sp", 1), dist.get_world_size()
    rank = dist.get_rank() // case.get("tp", 1) // sp
    share = GLOBAL_BATCH // data_ranks(case)
    losses = []
    for step in range(first, first + steps):
        batch = torch.Generator().manual_seed(step)
        data = torch.randint(0, VOCABULARY, (2, GLOBAL_BATCH, 6), generator=batch)
        mine = data[:, rank * share : (rank + 1) * share].chunk(sp, -1)[dist.get_rank() % sp]
        mine = mine.contiguous()
        loss = engine(mine[0], mine[1])
        # DeepSpeed adds up what sequence parallel ranks have, as parts of one loss.
        engine.backward(loss / sp)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
    return losses


def state_of(engine: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor of the training state in full, by ``name/slot``."""
    stage = case["stage"]
    found: dict[str, torch.Tensor] = {}
    _link(engine, stage)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                found[f"{name}/frozen"] = parameter.detach().float().clone()
            continue
        if stage == 0:
            found[f"{name}/weight"] = parameter.detach().float().clone()
            held = engine.optimizer.state[parameter]
            found |= {f"{name}/{slot}": held[slot].clone() for slot in SLOTS if slot in held}
            continue
        found[f"{name}/weight"] = safe_get_full_fp32_param(parameter).clone()
        for slot in SLOTS:
            if _has(engine, slot):
                value = safe_get_full_optimizer_state(parameter, slot)
                found[f"{name}/{slot}"] = value.detach().float().clone()
    for name, buffer in engine.module.named_buffers():
        found[f"{name}/buffer"] = buffer.float().clone()
    return {key: _whole(key, value.contiguous(), case) for key, value in found.items()}


def _whole(key: str, value: torch.Tensor, case: dict[str, Any]) -> torch.Tensor:
    """Return a tensor put together from the shards of all tensor-parallel ranks."""
    name = key.split("/", maxsplit=1)[0]
    if case.get("tp", 1) == 1 or name not in CUT_DIMS:
        return value
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    # Ranks of one tensor-parallel group are neighbours.
    return torch.cat(parts[: case["tp"]], dim=CUT_DIMS[name]).contiguous()


def _link(engine: Any, stage: int) -> None:
    # DeepSpeed 0.19.8 links the state of all groups after the first group's first step, when
    # the others have none yet; asking for it needs another time.
    if stage in {1, 2}:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _has(engine: Any, slot: str) -> bool:
    return any(slot in held for held in engine.optimizer.optimizer.state.values())


def small_values(engine: Any, stage: int) -> dict[str, Any]:
    """Return what the optimizer knows beside tensors."""
    inner = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    steps = {float(held["step"]) for held in inner.state.values() if "step" in held}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    return {
        "groups": groups,
        "steps": sorted(steps),
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
    }


def restore_the_rest(engine: Any, case: dict[str, Any], path: str) -> None:
    """Put frozen parameters and buffers in place, which DeepSpeed's universal load leaves out."""
    held = safetensors.torch.load_file(path)
    for name, parameter in engine.module.named_parameters():
        if f"{name}/frozen" in held:
            value = held[f"{name}/frozen"]
            if case["tp"] > 1 and name in CUT_DIMS:
                value = value.chunk(case["tp"], CUT_DIMS[name])[dist.get_rank() % case["tp"]]
            with deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
            ):
                parameter.data.copy_(value)
    for name, buffer in engine.module.named_buffers():
        buffer.copy_(held[f"{name}/buffer"])


def run(case: dict[str, Any], out: Path) -> None:
    """Train and save, or load; then tell the state and train on."""
    result: dict[str, Any] = {}
    if case["do"] == "train":
        engine = build(case, seed=1, spoilt=False)
        train(engine, case, 0, case["steps"])
        engine.save_checkpoint(case["directory"], client_state={"mine": [1, "two"]})
    else:
        engine = build(case, seed=2, spoilt=True)
        path, client = engine.load_checkpoint(case["directory"])
        assert path is not None, f"{case['name']}: nothing was loaded"
        result["mine"] = client.get("mine")
        if case.get("universal"):
            restore_the_rest(engine, case, str(out / f"{case['source']}.safetensors"))
    tensors = state_of(engine, case)
    if "pp" in case:
        tensors = train_deepspeed_pipeline.gathered(tensors)
    result |= small_values(engine, case["stage"])
    result["losses"] = train(engine, case, case["steps"], 3)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(tensors, out / f"{case['name']}.safetensors")
        (out / f"{case['name']}.json").write_text(json.dumps(result))
    engine.destroy()


def main() -> None:
    """Run every case of the job."""
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    # Without this operator all-reduces go through gloo; with it, DeepSpeed first compiles C++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in job:
        run(case, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
