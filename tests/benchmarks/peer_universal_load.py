"""DeepSpeed's own load of what ``ds_to_universal`` made: the second half of the peer's way from one
layout to another, for ``bench_convert``.

    python -m torch.distributed.run --nproc-per-node RANKS -m tests.benchmarks.peer_universal_load \
        FOLDER STAGE SHAPES

SHAPES is a JSON object of every parameter's shape, for what ZeRO-3 became is flat. Every rank
builds its engine first, with parameters of other values; of all that only the call of
``load_checkpoint`` counts, up to the end of the slowest rank. Rank 0 prints one line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn


def model_of(shapes: dict[str, list[int]]) -> nn.Module:
    """Return modules that have the parameters of these names, all of them zero."""
    root = nn.Module()
    for fqn, shape in shapes.items():
        *modules, name = fqn.split(".")
        owner = root
        for module in modules:
            if module not in owner._modules:
                owner.add_module(module, nn.Module())
            owner = owner.get_submodule(module)
        owner.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return root


def converted(folder: Path, name: str) -> torch.Tensor:
    """Return the elements of a parameter that ``ds_to_universal`` wrote."""
    held = torch.load(folder / "zero" / name / "fp32.pt", weights_only=False)
    elements: torch.Tensor = held["param"] if isinstance(held, dict) else held
    return elements.flatten()


def load(folder: Path, stage: int, shapes: dict[str, list[int]]) -> float:
    """Return the seconds in which this rank loads its part of ``folder``."""
    model = model_of(shapes)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dist.barrier()
    begun = time.perf_counter()
    path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    seconds = time.perf_counter() - begun
    assert path is not None, f"DeepSpeed found nothing to load in {folder}"
    name, parameter = next(iter(engine.module.named_parameters()))
    found = safe_get_full_fp32_param(parameter).flatten()
    assert torch.equal(found, converted(folder, name)), f"{name} was not loaded"
    return seconds


def main() -> None:
    """Load as one of several ranks; rank 0 tells the time of the slowest."""
    torch.set_num_threads(1)
    # Without this operator collectives go through gloo; with it, DeepSpeed first compiles C++.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    folder, stage, shapes = sys.argv[1:]
    seconds = torch.tensor(load(Path(folder), int(stage), json.loads(shapes)))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"load_s": round(float(seconds), 3)}), flush=True)
    dist.barrier()
    # torch's threads can abort a process on its way out.
    os._exit(0)


if __name__ == "__main__":
    main()
