"""The peer's training script: everstep's reference model under an elastic Ray Train job.

Written as Ray Train's guides ask for it: DDP, a checkpoint of the whole state by rank 0, reported
every other step, and no waiting that Ray Train does not ask for. Model, data, batch and optimizer
are everstep's defaults, so that a step here does the work of a step there.

``tests.benchmarks.peer_ray_train`` starts this file as a driver and kills what it has started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.data import DataOrder, Split, open_texts
from workers.models import Decoder, initial_value, mean_loss
from workers.settings import Settings, TrainSettings, model_shape

CHECKPOINT_EVERY_STEPS = 2
CHECKPOINT_FILE = "state.pt"


def build_model(settings: Settings) -> Decoder:
    """Return the reference model with everstep's initial values."""
    shape = model_shape(settings.model)
    model = Decoder(shape)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            value = initial_value(
                fqn, tuple(parameter.shape), seed=settings.train.seed, num_layers=shape.num_layers
            )
            parameter.copy_(value)
    return model


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and spares vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    beta_1, beta_2 = settings.betas
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(beta_1, beta_2), eps=settings.eps)


class Trainer:
    """Model, optimizer and data of one worker."""

    def __init__(self, settings: Settings, rank: int, world_size: int) -> None:
        self.settings = settings.train
        self.world_size = world_size
        self.split: Split = open_texts(settings.data).train
        self.order = DataOrder(
            seed=settings.data.seed,
            num_samples=self.split.num_samples,
            global_batch=self.settings.global_batch,
        )
        # Any number of workers shares the step; their counts differ by one at most.
        self.mine = range(rank, self.settings.num_micro_batches, world_size)
        self.plain = build_model(settings)
        self.model = DistributedDataParallel(self.plain)
        self.optimizer = build_optimizer(self.plain, self.settings)

    def step(self, step: int) -> None:
        """Perform ``step`` (from 1); every rank calls it."""
        samples = self.order.step(step)
        for at in self.mine:
            start = at * self.settings.micro_batch
            inputs, targets = self.split.batch(samples[start : start + self.settings.micro_batch])
            last = at == self.mine[-1]
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = mean_loss(self.model(torch.from_numpy(inputs)), torch.from_numpy(targets))
                # DDP averages over ranks; the step's loss is the mean over all micro-batches.
                (loss * self.world_size / self.settings.num_micro_batches).backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: str, step: int) -> None:
        """Write the whole state; one rank suffices."""
        state = {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": step}, Path(directory) / CHECKPOINT_FILE)

    def load(self, directory: str) -> int:
        """Load what ``save`` wrote; return its step."""
        state = torch.load(Path(directory) / CHECKPOINT_FILE)
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def train_loop(config: dict[str, Any]) -> None:
    """Train without end; append one line per step to a file of this process."""
    entered_s = time.time()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    node = ray.get_runtime_context().get_node_id()
    trainer = Trainer(config["settings"], rank, world_size)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            step = trainer.load(directory)
    record = {"entered_s": entered_s, "pid": os.getpid(), "node": node}
    record |= {"rank": rank, "world_size": world_size}
    path = Path(config["directory"]) / f"{node}-{os.getpid()}.jsonl"
    with path.open("a", buffering=1) as lines:
        while True:
            step += 1
            trainer.step(step)
            lines.write(json.dumps({**record, "step": step, "wall_time": time.time()}) + "\n")
            if step % CHECKPOINT_EVERY_STEPS == 0:
                _report(trainer, rank, step)


def _report(trainer: Trainer, rank: int, step: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            trainer.save(directory, step)
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    """Run the job on a cluster that is there, until somebody ends this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()
    steps = Path(arguments.directory) / "steps"
    steps.mkdir()
    ray.init(address=arguments.address, log_to_driver=False)
    # Ray 2.60 annotates what its first trainer took; the second takes a range.
    workers: Any = (1, arguments.workers)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"settings": Settings(), "directory": str(steps)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="peer",
            storage_path=str(Path(arguments.directory) / "storage"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
