"""An elastic Ray Train job, as its guides ask for it: DDP, and checkpoints that rank 0 reports."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

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


def train_loop() -> None:
    log = Log()
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    plain = build_model()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    # For the log alone: a name of the group.
    agreed = [str(time.time())]
    dist.broadcast_object_list(agreed, src=0)
    log.start(step=step, rank=rank, world=world, group=agreed[0])
    while not log.is_over(step):
        step += 1
        samples = order(step)[rank::world]
        log.samples(step, samples)
        # DDP takes the mean over ranks, the step is one over samples.
        loss = summed_loss(model, samples) * world / GLOBAL_BATCH
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        log.committed(step, loss.item())
        if step % PROBE_EVERY == 0:
            log.weights(step, probe(plain.named_parameters()))
        if step % SAVE_EVERY == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            report({**state, "step": step}, rank)


def report(state: dict[str, Any], rank: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            torch.save(state, Path(directory) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": state["step"]}, checkpoint=checkpoint)


def main() -> None:
    ray.init(address=f"127.0.0.1:{os.environ['PEERS_PORT']}", log_to_driver=False)
    # Ray 2.60 annotates what its first trainer took; the second takes a range.
    workers: Any = (1, 4)
    trainer = TorchTrainer(
        train_loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="peer",
            storage_path=f"{os.environ['PEERS_DIRECTORY']}/checkpoints",
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
