"""``everstep.checkpoint`` in a plain FSDP2 script, beside DCP and raw files: one rank.

``python -m tests.benchmarks checkpoint --torchrun`` starts it by torchrun. All ranks do the same at
the same time; a way takes from the start of its first rank to the end of its last. Files are in the
page cache. Every round has another order of the ways. Ratios are of medians: one lucky round of a
reference changes a ratio of best rounds by a third.

``async`` is how long training waits for an asynchronous save, ``memcpy`` one copy of the state of a
rank into memory that was used before. ``copy_write`` is the same copy, and a thread then writes it
as raw bytes at the lowest priority: the first rank's thread runs while other ranks copy. ``load``
fills FSDP2 over tensor parallelism from what FSDP2 alone saved; ``raw_read`` reads as many bytes.
Bytes read are those of the kernel's counter.
"""

import argparse
import json
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from everstep import checkpoint
from ucp_core.numerics import BLOCK_BYTES, crc32
from workers.niceness import be_nice

WIDTH, HIDDEN, TP = 1024, 2816, 2
#: Weight and both moments of a parameter, in float32.
PARAMETER_BYTES = 12
COPYING = ("memcpy", "copy_write")
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


class Block(nn.Module):
    """The matrices of a layer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(WIDTH, HIDDEN, bias=False))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)


class Bench:
    """A model with its optimizer under two layouts, and the ways to keep it."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        num_ranks = dist.get_world_size()
        size = sum(one.numel() for one in Block().parameters()) * PARAMETER_BYTES
        num_blocks = max(1, round(megabytes * 10**6 / size))
        self.state = _made(num_blocks, init_device_mesh("cpu", (num_ranks,)), tensor=None)
        mesh = init_device_mesh("cpu", (num_ranks // TP, TP), mesh_dim_names=("fsdp", "tp"))
        self.other = _made(num_blocks, mesh["fsdp"], tensor=mesh["tp"])
        # DCP's thread communicates while the training does, so it needs a group of its own.
        self.group = dist.new_group(backend="gloo")
        self.local, self.needed = _local(*self.state), _local(*self.other)
        # One stager for all saves keeps its memory, as everstep does.
        self.stager = DefaultStager(_STAGING)
        # Each way has its own memory: what was written twice in a round is a fifth faster.
        self.copies = {way: list(map(torch.zeros_like, self.local)) for way in COPYING}
        self.writer = ThreadPoolExecutor(1, "writer", partial(be_nice, 19))
        self.step = 0
        self.future: Any = None

    def raw_write(self) -> None:
        """Write this rank's bytes and nothing else, 1 MiB a call."""
        self._write("raw", self.local)

    def checked_write(self) -> None:
        """Compute the checksum of each block before its write, as the format needs it."""
        self._write("checked", self.local, is_checked=True)

    def _write(self, name: str, tensors: list[Tensor], *, is_checked: bool = False) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / f"{name}/{self.rank}").open("wb", buffering=0) as file:
            for one in tensors:
                view = _bytes(one)
                for low in range(0, len(view), BLOCK_BYTES):
                    block = view[low : low + BLOCK_BYTES]
                    if is_checked:
                        crc32(block)
                    file.write(block)

    def raw_read(self) -> None:
        """Read as many bytes as a rank needs, 2 MiB a call."""
        path = self.folder / f"raw/{self.rank}"
        with path.open("rb", buffering=0) as file:
            offset, size = 0, path.stat().st_size
            for one in self.needed:
                view = _bytes(one)
                for low in range(0, len(view), 2 << 20):
                    part = view[low : low + (2 << 20)]
                    # Another layout has a little more on one rank than on another.
                    offset = offset if offset + len(part) <= size else 0
                    assert os.preadv(file.fileno(), [part], offset) == len(part)
                    offset += len(part)

    def save(self) -> None:
        """Save as a script does."""
        model, optimizer = self.state
        checkpoint.save(self._next("ours"), self.step, model=model, optimizer=optimizer)

    def async_save(self) -> None:
        """Return as soon as training may continue."""
        model, optimizer = self.state
        checkpoint.async_save(self._next("ours"), self.step, model=model, optimizer=optimizer)

    def load(self) -> None:
        """Load under the other layout."""
        model, optimizer = self.other
        checkpoint.load(self.folder / "ours", model=model, optimizer=optimizer)

    def dcp_save(self) -> None:
        """Save as torch's documentation does."""
        dcp.save(self._torch(self.state), checkpoint_id=self.folder / "dcp")

    def dcp_async_save(self) -> None:
        """Return as soon as training may continue."""
        state, group = self._torch(self.state), self.group
        where = self.folder / "dcp"
        self.future = dcp.async_save(
            state, checkpoint_id=where, process_group=group, async_stager=self.stager
        )

    def dcp_load(self) -> None:
        """Load under the other layout, as torch's documentation does."""
        state, (model, optimizer) = self._torch(self.other), self.other
        dcp.load(state, checkpoint_id=self.folder / "dcp")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def memcpy(self, way: str = "memcpy") -> None:
        """Copy this rank's state once."""
        for copy, one in zip(self.copies[way], self.local, strict=True):
            copy.copy_(one)

    def copy_write(self) -> None:
        """Copy this rank's state, and write the copy in the background."""
        self.memcpy("copy_write")
        self.future = self.writer.submit(self._write, "copy", self.copies["copy_write"])

    def clear(self, way: str) -> None:
        """Remove what a way wrote before, so that it makes new files; wait for what it began."""
        if self.rank == 0 and way in WRITTEN:
            shutil.rmtree(self.folder / WRITTEN[way], ignore_errors=True)

    def end(self, way: str) -> None:
        """Wait for what an asynchronous way began."""
        checkpoint.wait()
        if way in ("copy_write", "dcp_async"):
            self.future.result()

    @torch.no_grad()
    def check(self) -> None:
        """Stop if what was loaded is not what was saved; forget it."""
        for (name, one), (_, other) in zip(
            self.state[0].named_parameters(), self.other[0].named_parameters(), strict=True
        ):
            pairs = [(one, other)]
            held, found = self.state[1].state[one], self.other[1].state[other]
            pairs += [(held[slot], found[slot]) for slot in held]
            for expected, value in pairs:
                assert torch.equal(_whole(expected), _whole(value)), name
                value.mul_(0)

    def _next(self, name: str) -> Path:
        self.step += 1
        return self.folder / name

    @staticmethod
    def _torch(state: tuple[nn.Module, torch.optim.Optimizer]) -> dict[str, Any]:
        weights, moments = get_state_dict(*state)
        return {"model": weights, "optimizer": moments}


#: ``dcp.async_save`` uses the same options if it makes the stager.
_STAGING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
#: The folder that a way writes to.
WRITTEN = {
    "raw_write": "raw",
    "checked_write": "checked",
    "save": "ours",
    "copy_write": "copy",
    "async": "ours",
    "dcp_save": "dcp",
    "dcp_async": "dcp",
}


def _made(
    num_blocks: int, mesh: DeviceMesh, tensor: DeviceMesh | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(num_blocks))
    plan: dict[str, ParallelStyle] = {f"*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"*.{name}": RowwiseParallel() for name in ROWS}
    if tensor is not None:
        parallelize_module(model, tensor, plan)
    for block in model:
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _local(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found: list[Any] = []
    for parameter in model.parameters():
        found += [parameter, *optimizer.state[parameter].values()]
    plain = [one.to_local() if isinstance(one, DTensor) else one for one in found]
    return [one.detach() for one in plain if one.dim()]


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return whole


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Return times, speeds and ratios; every rank calls it."""
    ways: list[tuple[str, Callable[[], None]]] = [
        ("raw_write", bench.raw_write),
        ("checked_write", bench.checked_write),
        ("save", bench.save),
        ("dcp_save", bench.dcp_save),
        ("memcpy", bench.memcpy),
        ("copy_write", bench.copy_write),
        ("async", bench.async_save),
        ("dcp_async", bench.dcp_async_save),
        ("raw_read", bench.raw_read),
        ("load", bench.load),
        ("dcp_load", bench.dcp_load),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    read = dict.fromkeys(("load", "dcp_load"), 0)
    for number in range(rounds + 1):
        # Loads come after what they load, so each half has its own order.
        order = [*_shuffled(ways[:8], number), *_shuffled(ways[8:], number)]
        for name, way in order:
            bench.clear(name)
            dist.barrier()
            before, begun_s = _read_bytes(), time.monotonic()
            way()
            spent = [begun_s, time.monotonic(), float(_read_bytes() - before)]
            bench.end(name)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, spent)
            if name in ("load", "dcp_load"):
                bench.check()
                read[name] = int(sum(one[2] for one in every))
            # The first round pays for imports and for what is touched first.
            if number:
                times[name].append(max(one[1] for one in every) - min(one[0] for one in every))
    bench.stager.close()
    return _summary(bench, times, read)


def _shuffled(ways: list[Any], seed: int) -> list[Any]:
    """Return the ways in the same order on all ranks.

    In a fixed order each way always follows the same one, and a copy after a copy takes 15 % less.
    """
    return random.Random(seed).sample(ways, len(ways))


def _summary(bench: Bench, times: dict[str, list[float]], read: dict[str, int]) -> dict[str, Any]:
    sizes: list[Any] = [None] * dist.get_world_size()
    mine = [sum(one.nbytes for one in each) for each in (bench.local, bench.needed)]
    dist.all_gather_object(sizes, mine)
    saved_bytes, needed_bytes = (sum(one[number] for one in sizes) for number in (0, 1))
    medians = {name: statistics.median(values) for name, values in times.items()}

    def ratio(way: str, peer: str) -> float:
        return round(medians[peer] / medians[way], 2)

    return {
        "bytes": saved_bytes,
        "ranks": dist.get_world_size(),
        "cores": os.cpu_count(),
        "rounds": len(times["save"]),
        "median_ms": {name: round(value * 1e3, 1) for name, value in medians.items()},
        "best_ms": {name: round(min(values) * 1e3, 1) for name, values in times.items()},
        "read_of_needed": {name: round(one / needed_bytes, 3) for name, one in read.items()},
        "save_vs_raw_write": ratio("save", "raw_write"),
        "checked_write_vs_raw_write": ratio("checked_write", "raw_write"),
        "save_vs_checked_write": ratio("save", "checked_write"),
        "dcp_save_vs_raw_write": ratio("dcp_save", "raw_write"),
        "load_vs_raw_read": ratio("load", "raw_read"),
        "dcp_load_vs_raw_read": ratio("dcp_load", "raw_read"),
        "async_of_memcpy": ratio("memcpy", "async"),
        "async_of_copy_write": ratio("copy_write", "async"),
        "copy_write_of_memcpy": ratio("memcpy", "copy_write"),
        "dcp_async_of_memcpy": ratio("memcpy", "dcp_async"),
    }


def main() -> None:
    """Be one rank; rank 0 prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    where: list[Any] = [None]
    if dist.get_rank() == 0:
        where = [tempfile.mkdtemp(dir=options.directory)]
    dist.broadcast_object_list(where)
    try:
        result = measure(Bench(options.megabytes, Path(where[0])), options.rounds)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where[0], ignore_errors=True)
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1) if options.json else _table(result), flush=True)
    dist.destroy_process_group()


def _table(result: dict[str, Any]) -> str:
    size, ranks = f"{result['bytes'] / 1e6:.0f} MB", f"{result['ranks']} ranks"
    lines = [f"{size}, {ranks}, {result['cores']} cores, {result['rounds']} rounds"]
    for name, value in result["median_ms"].items():
        speed = result["bytes"] / value / 1e6
        best = result["best_ms"][name]
        lines.append(f"  {name:<13} median {value:9.1f} ms, best {best:9.1f} ms, {speed:6.2f} GB/s")
    lines += [f"  {name:<26} {one:5.2f}" for name, one in result.items() if isinstance(one, float)]
    reads = (f"{name} {one:.3f}" for name, one in result["read_of_needed"].items())
    return "\n".join([*lines, f"  bytes read of those needed: {', '.join(reads)}"])


if __name__ == "__main__":
    main()
