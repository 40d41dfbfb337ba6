"""Peers of snapshots in a plain torch training: ``dcp.async_save``, and torchft's live transfer.

The transfer is made as torchft's ``HTTPTransport`` makes it (github.com/meta-pytorch/torchft,
torchft/checkpointing/http_transport.py): a server in a thread of each worker streams the state by
torch's own streaming format, the receiver reads it from the response, and no worker changes its
state before all that were allowed to fetch it have.
"""

from __future__ import annotations

import http.server
import logging
import threading
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.benchmarks.steps import Job, Meter, batch
from tests.support.ranks import Place
from workers.models import Decoder, mean_loss
from workers.settings import TrainSettings
from workers.train.lm import adamw

MICRO_BATCH = 2


class AsyncSave:
    """``dcp.async_save`` after every step, one in flight."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Its thread communicates while the training does: in the group of that, they mix.
        self._group = dist.new_group(backend="gloo")
        self._under_way: Any = None

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Wait for the last one and begin the next."""
        self.wait()
        weights, moments = get_state_dict(model, optimizer)
        self._under_way = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=str(self._directory / f"dcp-{step % 2}"),
            process_group=self._group,
        )

    def wait(self) -> None:
        """Return when none is under way."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None


class Transfer:
    """The state of every rank is sent to the rank before it."""

    def __init__(self, rank: int, world_size: int) -> None:
        transfer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                _streaming_save(transfer.state, self.wfile)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.state: dict[str, Any] = {}
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        ports: list[Any] = [None] * world_size
        dist.all_gather_object(ports, self._server.server_address[1])
        self._url = f"http://127.0.0.1:{ports[(rank + 1) % world_size]}/"

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, _step: int) -> None:
        """Serve the state, fetch that of the next rank, and wait for all others."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.state = {
            f"{slot}.{name}": tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for parameter, name in names.items()
            for slot, tensor in [
                ("weight", parameter.detach()),
                *optimizer.state[parameter].items(),
            ]
        }
        dist.barrier()
        with urllib.request.urlopen(self._url) as response:  # noqa: S310  our own server
            fetched: Any = _streaming_load(response, weights_only=False)
        assert len(fetched) == len(self.state)
        dist.barrier()

    def wait(self) -> None:
        """Return at once: ``save`` waits."""


def train_plainly(place: Place, *, job: Job) -> dict[str, Any]:
    """Be one worker of a plain training; return what the meter saw."""
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
    savers: dict[str, AsyncSave | Transfer] = {
        "async_save": AsyncSave(place.directory),
        "transfer": Transfer(place.rank, job.workers),
    }
    meter = Meter(job, [])
    each = job.global_batch // job.workers
    before = ""
    for step in range(1, job.num_steps + 1):
        meter.tick()
        way = job.way(step)
        if way != before and before in savers:
            savers[before].wait()
        before = way
        for low in range(0, each, MICRO_BATCH):
            start = step * job.global_batch + place.rank * each + low
            inputs, targets = batch(range(start, start + MICRO_BATCH), job.shape.vocab_size)
            mean_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if way in savers:
            savers[way].save(model, optimizer, step)
    for saver in savers.values():
        saver.wait()
    dist.barrier()
    dist.destroy_process_group()
    return meter.seen()
