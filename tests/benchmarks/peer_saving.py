"""The peer of snapshots in a plain torch training: ``dcp.async_save``.

torchft's live transfer has no row: it sends state only to a rank that is behind, so it costs a
failure-free run nothing and protects nothing.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.benchmarks.steps import Job, Meter, batch
from tests.support.ranks import Place
from workers.models import Decoder, mean_loss
from workers.settings import TrainSettings
from workers.train.lm import adamw

MICRO_BATCH = 2


class AsyncSave:
    """``dcp.async_save`` into the page cache, one in flight."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Its thread communicates while the training does, so it needs a group of its own.
        self._group = dist.new_group(backend="gloo")
        self._in_flight: Any = None

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Wait for the save before and start this one."""
        self.wait()
        weights, moments = get_state_dict(model, optimizer)
        self._in_flight = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=str(self._directory / f"dcp-{step % 2}"),
            process_group=self._group,
        )

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._in_flight is not None:
            self._in_flight.result()
            self._in_flight = None


def train_plainly(place: Place, *, job: Job, save_every: int) -> dict[str, Any]:
    """Be one worker of a plain training; return what the meter saw.

    Args:
        place: Which worker.
        job: The training.
        save_every: Steps between two saves, in the blocks of the way ``async_save``.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=job.workers)
    mesh = init_device_mesh("cpu", (job.workers,))
    torch.manual_seed(0)
    model = Decoder(job.shape)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.tie()
    optimizer = adamw(dict(model.named_parameters()), TrainSettings())
    saver = AsyncSave(place.directory)
    meter = Meter(job, [])
    each = job.global_batch // job.workers
    before = ""
    for step in range(1, job.num_steps + 1):
        meter.tick()
        way = job.way(step)
        if way != before:
            saver.wait()
        before = way
        for low in range(0, each, MICRO_BATCH):
            start = step * job.global_batch + place.rank * each + low
            inputs, targets = batch(range(start, start + MICRO_BATCH), job.shape.vocab_size)
            mean_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if way == "async_save" and step % save_every == 0:
            saver.save(model, optimizer, step)
    saver.wait()
    dist.barrier()
    dist.destroy_process_group()
    return meter.seen()
