"""FSDP2 under torchrun's elastic launch, with an asynchronous save of DCP each ten steps.

As in torch's documentation: "Train script" of torchrun (load the newest checkpoint at the start)
and the recipe "Asynchronous Saving with Distributed Checkpoint (DCP)".
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.benchmarks.peers.events import Log
from tests.benchmarks.peers.trainer import (
    CLIP_NORM,
    GLOBAL_BATCH,
    LR,
    PROBE_EVERY,
    build_model,
    order,
    probe,
    summed_loss,
)

SAVE_EVERY = 10


class AppState(Stateful):
    """Model and optimizer as DCP saves and loads them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def newest(checkpoints: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 if there is none."""
    return max((int(path.parent.name) for path in checkpoints.glob("*/.metadata")), default=0)


def main() -> None:
    log = Log()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = build_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    checkpoints = log.directory / "checkpoints"
    state = {"app": AppState(model, optimizer)}
    # Rank 0 decides, so that all load the same one; the log gets a name of the group beside it.
    agreed = [(newest(checkpoints), str(time.time()))]
    dist.broadcast_object_list(agreed, src=0)
    step, group = agreed[0]
    if step:
        dcp.load(state, checkpoint_id=checkpoints / str(step))
    saving_group = dist.new_group(backend="gloo")
    saving: Any = None

    log.start(step=step, rank=rank, world=world, group=group)
    while not log.is_over(step):
        step += 1
        samples = order(step)[rank::world]
        log.samples(step, samples)
        # FSDP takes the mean over ranks, the step is one over samples.
        loss = summed_loss(model, samples) * world / GLOBAL_BATCH
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        log.committed(step, loss.item())
        if step % PROBE_EVERY == 0:
            log.weights(step, probe(model.named_parameters()))
        if step % SAVE_EVERY == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                state, checkpoint_id=checkpoints / str(step), process_group=saving_group
            )
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
