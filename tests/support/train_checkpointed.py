"""A plain script with ``everstep.checkpoint``, for ``torchrun``; no session and no Ray.

    torchrun --nproc-per-node 4 train_checkpointed.py save FOLDER
    torchrun --nproc-per-node 2 train_checkpointed.py load FOLDER

The first saves under several layouts. While it saves for the last time one rank is killed. The
second loads under others, and says whether every bit is equal.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from everstep import checkpoint
from ucp_core.storage import LocalStore


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.norm = nn.LayerNorm(6)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = self.norm(hidden + self.down(torch.relu(self.up(hidden))))
        logits: Tensor = self.head(hidden)
        return logits


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [one for one in model.parameters() if one.dim() > 1]},
        {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))
    cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        if name.endswith("seen"):
            buffer.add_(1)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the state, whole; every rank calls it."""
    found: dict[str, Any] = {}
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        name = name.removeprefix("module.")  # noqa: PLW2901
        found[name] = one
        for slot, value in optimizer.state.get(one, {}).items():
            found[f"{name}:{slot}"] = value
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in sorted(found.items())
    }


def sharded(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def save(folder: Path) -> None:
    rank, four = dist.get_rank(), init_device_mesh("cpu", (4,))
    model, optimizer = sharded(four)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    extra = {"schedule": schedule, "by_rank": {f"rank {rank}": rank}, "who": rank}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": extra}
    main = folder / "main"

    def step(number: int) -> dict[str, Tensor]:
        train(model, optimizer, 10 * number + rank)
        schedule.step()
        return whole(model, optimizer)

    step(1)
    checkpoint.save(main, 1, **state)
    expected = step(2)
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    checkpoint.async_save(main, 2, **state)
    # Meanwhile training changes what is written.
    step(3)
    checkpoint.wait()

    save_others(folder)
    (folder / f"{rank}.saved").touch()
    dist.barrier()
    if rank == 1:
        LocalStore.write_file = killed  # type: ignore[method-assign, assignment]
    checkpoint.async_save(main, 3, **state)
    checkpoint.wait()
    dist.barrier()


def save_others(folder: Path) -> None:
    """Save under layouts in which several ranks hold the same elements."""
    rank = dist.get_rank()
    hybrid, moments = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    checkpoint.load(folder / "main/step-00000001", model=hybrid)
    train(hybrid, moments, 3)
    checkpoint.save(folder / "hybrid", 1, model=hybrid, optimizer=moments)

    # A rank knows least of the others here: each of two stages is on two ranks.
    name = "up" if rank % 2 else "down"
    stage = nn.ModuleDict({name: build().get_submodule(name)})
    checkpoint.save(folder / "stages", 1, model=stage, optimizer=adamw(stage))

    copies: Any = DistributedDataParallel(build())
    moments = adamw(copies)
    train(copies, moments, 5)
    checkpoint.save(folder / "copies", 1, model=copies, optimizer=moments)
    if rank == 0:
        torch.save(whole(copies, moments), folder / "copies.pt")


def killed(store: LocalStore, path: str, chunks: Any, *, fsync: bool) -> int:  # noqa: ARG001
    """Be killed in the middle of a file, when all other ranks have written theirs."""
    data, folder = b"".join(bytes(chunk) for chunk in chunks), Path(path).parent
    while len([*folder.glob("*.json")]) < dist.get_world_size() - 1:
        time.sleep(0.01)
    (folder / f".tmp-{Path(path).name}").write_bytes(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def load(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    told: dict[str, Any] = {}
    expected = torch.load(folder / "expected.pt")

    def compare(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found = whole(model, optimizer)
        told[name] = found.keys() == expected.keys() and all(
            torch.equal(found[key], one) for key, one in expected.items()
        )

    model, optimizer = sharded(mesh)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    main = folder / "main"
    loaded = checkpoint.load(main, model=model, optimizer=optimizer, extra={"schedule": schedule})
    told |= {"step": loaded.step, "extra": {k: loaded.extra[k] for k in ("by_rank", "who")}}
    told["lr"] = [group["lr"] for group in optimizer.param_groups]
    told["decay"] = [group["weight_decay"] for group in optimizer.param_groups]
    told["schedule"] = schedule.last_epoch
    compare("fsdp", model, optimizer)

    cut = build()
    parallelize_module(cut, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    moments = adamw(cut)
    checkpoint.load(main, model=cut, optimizer=moments)
    compare("tp", cut, moments)

    train(model, optimizer, 7)
    checkpoint.save(main, 3, model=model, optimizer=optimizer)
    checkpoint.save(folder / "tensor", 1, model=cut, optimizer=moments)
    dist.barrier()
    told["newest"] = checkpoint.newest(main)
    if dist.get_rank() == 0:
        (folder / "loaded.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
