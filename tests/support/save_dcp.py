"""Trains a small model on several processes and saves it with torch DCP, as users do.

``torchrun ... -m tests.support.save_dcp KIND DIRECTORY``. Rank 0 also writes what every tensor is,
gathered in the processes and not from files, to ``DIRECTORY/../expected.safetensors``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

#: How the first FSDP saves, and whether its parameters stay parameters.
FSDP1 = {
    "fsdp1_sharded": (StateDictType.SHARDED_STATE_DICT, True),
    "fsdp1_local": (StateDictType.LOCAL_STATE_DICT, False),
    "fsdp1_local_original": (StateDictType.LOCAL_STATE_DICT, True),
}


class Model(nn.Module):
    """Sizes that four ranks cannot divide; of the last one the last rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 5, bias=False)
        self.register_buffer("seen", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.down(torch.relu(self.up(x)))))
        return out


def build(kind: str) -> nn.Module:
    """Return the model, sharded as ``kind`` says, on four ranks."""
    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind in FSDP1:
        device, original = torch.device("cpu"), FSDP1[kind][1]
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=original)
    if kind == "fsdp2_tp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["fsdp"])
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def as_sharded_tensor(value: Any) -> Any:
    """Return a tensor as the class by which the first FSDP saves it."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    _, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    shards = [Shard.from_tensor_and_offsets(local, list(offsets), dist.get_rank())]
    return init_from_local_shards(shards if local.numel() else [], *value.shape)


def full(tensor: Any) -> torch.Tensor:
    """Return the whole tensor on every rank."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().contiguous()


def main(kind: str, directory: str) -> None:
    """Train, save, and write what was saved."""
    dist.init_process_group("gloo")
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    weights: dict[str, Any]
    states: Any
    weights, states = get_state_dict(model, optimizer)
    if kind == "sharded_tensors":
        weights = {fqn: as_sharded_tensor(value) for fqn, value in weights.items()}
        for slots in states["state"].values():
            slots.update({slot: as_sharded_tensor(value) for slot, value in slots.items()})
    if kind in FSDP1:
        with FullyShardedDataParallel.state_dict_type(model, FSDP1[kind][0]):
            weights = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    state = {"model": weights, "optim": states, "train": {"step": 3}}
    if kind == "no_collectives":
        # Every rank writes its own data and metadata, without a word to the others.
        writer = FileSystemWriter(directory)
        dcp.save(state, storage_writer=writer, use_collectives=False)
    else:
        dcp.save(state, checkpoint_id=directory)
    options = StateDictOptions(full_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        expected = {f"{fqn}.fp32": full(tensor) for fqn, tensor in weights.items()}
        for fqn, slots in states["state"].items():
            expected |= {f"{fqn}.{slot}": full(value) for slot, value in slots.items()}
        save_file(expected, str(Path(directory).parent / "expected.safetensors"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # All is written. torch's threads can abort a process on its way out (seen under load).
    sys.stdout.flush()
    os._exit(0)
