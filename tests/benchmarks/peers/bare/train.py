"""FSDP2 under torchrun, as torch's tutorial writes it: no checkpoint, no second try."""

import torch
import torch.distributed as dist
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

    step = 0
    log.start(step=step, rank=rank, world=world, group="only")
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
