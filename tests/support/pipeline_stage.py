"""One stage of a real pipeline on the CPU, which takes a snapshot of a state in each step.

Its passes take time and no processor, as those of a device; its copies too. It writes down, for
each step, when it computed and when each bucket left.
"""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.support.copying_lane import Done
from workers.memory import Credits, Mark
from workers.snapshot import device as device_module
from workers.snapshot import on_passes
from workers.snapshot.device import DeviceCopy

NUM_STEPS = 6
NUM_BUCKETS = 12
BUCKET_BYTES = 4096
COPY_S = 0.006
#: A busy machine starts threads some milliseconds late.
PASS_S = 0.06
NUM_BLOCKS = 2
WIDTH = 8


class _Bus:
    """A ``workers.memory.cuda.CopyStream`` that notes when what left."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.left_s: list[float] = []

    def mark(self) -> Mark:
        return Done()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        def run() -> None:
            if after is not None:
                after.wait()
            self.left_s.append(time.monotonic())
            time.sleep(COPY_S)
            for target, source in pairs:
                target.copy_(source)

        return Done(self._thread.submit(run))

    def hold(self, mark: Mark) -> None:
        mark.wait()

    def gap(self) -> None:
        pass


#: From when to when this stage computed in a step.
_busy: list[tuple[float, float]] = []


def _compute() -> None:
    """Take a block's part of a pass."""
    begun_s = time.monotonic()
    time.sleep(PASS_S / NUM_BLOCKS)
    _busy.append((begun_s, time.monotonic()))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        _compute()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        _compute()
        return gradients[0]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Pass.apply(self.linear(x))
        return found


def main(rank: int, num_stages: int, folder: Path) -> None:
    """Train a few steps, in a process of its own."""
    torch.set_num_threads(1)
    found: Any = device_module
    found.BUCKET_BYTES = BUCKET_BYTES
    store = dist.FileStore(str(folder / "store"), num_stages)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_stages)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(NUM_BLOCKS)))
    stage = PipelineStage(model, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2 * num_stages, loss_fn=nn.MSELoss())
    bus = _Bus()
    copy = DeviceCopy(Credits(folder / f"node-{rank}", 1), BUCKET_BYTES, bus)
    on_passes(model, copy.passed)
    source = torch.randn(NUM_BUCKETS * BUCKET_BYTES // 4)
    target = torch.zeros_like(source)
    array: Any = target.view(torch.uint8).numpy()
    data = [memoryview(array)]
    x = torch.randn(2 * num_stages, WIDTH)
    notes: list[dict[str, Any]] = []
    for _ in range(NUM_STEPS):
        dist.barrier()
        _busy.clear()
        bus.left_s.clear()
        target.zero_()
        copy.begin([target], [source], num_checked=1)
        thread = threading.Thread(target=copy.run, args=(data,))
        thread.start()
        if rank == 0:
            schedule.step(x)
        elif rank == num_stages - 1:
            schedule.step(target=x)
        else:
            schedule.step()
        copy.hold_update()
        thread.join()
        assert torch.equal(target, source)
        notes.append({"busy": list(_busy), "left": list(bus.left_s)})
    (folder / f"{rank}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()
