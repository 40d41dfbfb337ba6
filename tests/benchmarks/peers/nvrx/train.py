"""FSDP2 with NVRx's in-process restart, and a save of DCP each ten steps.

As in NVRx's usage guide: the wrapped function builds everything again, from the newest checkpoint,
in a store of its own for each iteration.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext import inprocess
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


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper | None = None) -> None:
    log = Log()
    assert call is not None, "the wrapper gives it"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"train {call.iteration}", dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
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
            dcp.save(state, checkpoint_id=checkpoints / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
