"""Trains and loads with real DeepSpeed, several cases in one launch; run by torchrun.

``python -m torch.distributed.run --nproc-per-node N -m tests.support.train_deepspeed JOB OUT``:
JOB is a JSON list of cases, OUT a folder that gets ``<name>.json`` and ``<name>.safetensors``.
"""

import json
from pathlib import Path
from typing import Any

import deepspeed
import safetensors.torch
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.support import train_deepspeed_pipeline
from tests.support.deepspeed_models import (
    CUT_DIMS,
    GLOBAL_BATCH,
    TENSOR_PARALLEL,
    VOCABULARY,
    Experts,
    Parallel,
    Whole,
    joined,
    run_job,
    sequence_ranks,
    state_of,
    with_all_experts,
)


def build(case: dict[str, Any], *, seed: int, spoilt: bool) -> Any:
    """Return an engine; a spoilt one has hyper-parameters that a checkpoint has to replace."""
    if "pp" in case:
        return train_deepspeed_pipeline.build(case, seed=seed, spoilt=spoilt)
    kind = case.get("model")
    torch.manual_seed(seed + (dist.get_rank() if kind == "experts" else 0))
    model: nn.Module = Whole()
    if kind == "parallel":
        model = Parallel(biased=False)
    elif kind == "experts":
        model = Experts(case["ep"], balance=0.0)
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
    if kind == "experts":
        named = [group | {"name": str(number)} for number, group in enumerate(groups)]
        groups = split_params_into_different_moe_groups_for_optimizer(named)
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
    ranks = sequence_ranks(case)
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


def gathered(mine: dict[str, torch.Tensor], case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors of all stages and tensor parallel ranks."""
    if "pp" in case:
        return train_deepspeed_pipeline.gathered(mine)
    if case.get("tp", 1) == 1 and "ep" not in case:
        return mine
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    if "ep" in case:
        return with_all_experts(held, case["ep"])
    return joined(held[: case["tp"]])


def small_values(engine: Any, stage: int) -> dict[str, Any]:
    """Return what the optimizer knows beside tensors."""
    inner = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    steps = {float(held["step"]) for held in inner.state.values() if "step" in held}
    # Groups of experts are named by the number of ranks.
    unlike = {"params", "name"}
    groups = [{k: v for k, v in group.items() if k not in unlike} for group in inner.param_groups]
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
    tensors = gathered(state_of(engine, case), case)
    result |= small_values(engine, case["stage"])
    result["losses"] = train(engine, case, case["steps"], 3)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(tensors, out / f"{case['name']}.safetensors")
        (out / f"{case['name']}.json").write_text(json.dumps(result))
    engine.destroy()


if __name__ == "__main__":
    run_job(run)
