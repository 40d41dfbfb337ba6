"""Loading a checkpoint under another layout: everstep, DCP, and raw reads of the same bytes.

    python -m tests.benchmarks load --width 2048 4096 --megabytes 2400 --rounds 9 --json

Four processes save a decoder's weights and Adam moments under fsdp 4, as FSDP2 cuts them, with
``dcp.save`` and with ``save_rank``. Then the four load as fsdp 2 x tp 2.

- ``ours`` opens and loads the DCP checkpoint, ``native`` our own, of which it verifies every byte.
- ``dcp`` is ``dcp.load`` into DTensors, which verifies nothing.
- ``raw`` and ``native raw`` read as many bytes as the rank needs from every file that holds some of
  them, sequentially, at most 8 MiB a call, with as many threads as ours. They know beforehand what
  to read, verify nothing and put nothing in its place. The two ranks of tensor parallelism read
  from opposite ends of a file, so that neither finds the other's bytes in the processor's cache.
- ``rows`` reads exactly the bytes needed and puts them in place: whole rows at most 8 MiB a call,
  parts of rows with a call each. No load that reads only these bytes can be faster.

All ways fill the same tensors, which were written before, so no way pays for fresh pages. The page
cache is warm. ``alone`` is one rank while the others wait, with one and with two threads;
``together`` is all ranks at once, from the first start to the last end. The ways take turns in
every round, and every result but the raw reads is compared with what was saved.

Ratios are medians over rounds of the ratio within a round; times are medians; processor seconds are
the best of the rounds, of all ranks.

The narrow decoder has the tensors of a 1 B model, the wide one those of a 7 B model; at least one
layer is made. Opening costs ours 0.04 ms per chunk of any rank, which weighs less the larger the
chunks are, so report both. Two limits apply to ours alone: a third of the bytes needed are columns,
between which as many other bytes lie, and checksums cover whole blocks, which must be read whole.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.ranks import Place, running
from ucp_core.formats import open_source
from ucp_core.geometry import Box
from ucp_core.native import LocalTensor, load, open_checkpoint, save_rank
from ucp_core.storage import LocalStore

NUM_RANKS, FSDP, TP = 4, 2, 2
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
#: Width of the feed-forward layer by that of the model.
HIDDEN = {2048: 8192, 4096: 11008}
READ_BYTES = 8 << 20
RUN_S_MAX = 1800
#: The way that each way is compared with. No load that reads can be faster than ``raw vs dcp``
#: says.
PEERS = {
    "ours": ("raw", "rows", "dcp"),
    "native": ("native raw", "dcp"),
    "raw": ("dcp",),
    "rows": ("raw", "dcp"),
}


class Parameter(NamedTuple):
    """A parameter and the dim that tensor parallelism cuts."""

    fqn: str
    shape: tuple[int, ...]
    cut: int | None


def parameters(megabytes: int, width: int) -> list[Parameter]:
    """Return the parameters of a decoder whose state has about ``megabytes``."""
    hidden = HIDDEN[width]
    block = {
        "attention.wq": ((width, width), 0),
        "attention.wk": ((width, width), 0),
        "attention.wv": ((width, width), 0),
        "attention.wo": ((width, width), 1),
        "feed_forward.w1": ((hidden, width), 0),
        "feed_forward.w2": ((width, hidden), 1),
        "feed_forward.w3": ((hidden, width), 0),
        "norm": ((width,), None),
    }
    size = 4 * len(SLOTS) * sum(Box.full(shape).num_elements for shape, _ in block.values())
    return [
        Parameter(f"layers.{layer}.{name}.weight", shape, cut)
        for layer in range(max(1, megabytes * 10**6 // size))
        for name, (shape, cut) in block.items()
    ]


def key_of(fqn: str, slot: str) -> str:
    """Return the key under which DCP keeps a tensor."""
    return f"model.{fqn}" if slot == "weight" else f"optim.state.{fqn}.{slot}"


def saved_box(parameter: Parameter, rank: int) -> Box:
    """Return what fsdp 4 leaves to a rank."""
    return Box.full(parameter.shape).piece(0, rank, NUM_RANKS)


def loaded_box(parameter: Parameter, rank: int) -> Box:
    """Return what tp 2, and then fsdp 2, leave to a rank."""
    box = Box.full(parameter.shape)
    if parameter.cut is not None:
        box = box.piece(parameter.cut, rank % TP, TP)
    return box.piece(0, rank // TP, FSDP)


def values(parameter: Parameter, slot: str, box: Box) -> torch.Tensor:
    """Return the elements that belong there; every one tells its place."""
    seed = hash((len(parameter.fqn), *map(ord, parameter.fqn + slot))) % 1000
    rows = torch.arange(box.start[0], box.stop[0], dtype=torch.int32)
    if len(box.start) == 1:
        return (rows + seed).view(torch.float32)
    columns = torch.arange(box.start[1], box.stop[1], dtype=torch.int32)
    # As bits: a float counts to 16 million.
    return (rows[:, None] * parameter.shape[1] + columns + seed).view(torch.float32)


def placements(parameter: Parameter) -> tuple[Placement, ...]:
    """Return how FSDP2 over tensor parallelism spreads a parameter over (fsdp, tp)."""
    if parameter.cut is None:
        return (Shard(0), Replicate())
    if parameter.cut == 0:
        return (_StridedShard(0, split_factor=TP), Shard(0))
    return (Shard(0), Shard(parameter.cut))


def dtensor(
    parameter: Parameter, local: torch.Tensor, mesh: DeviceMesh, spread: tuple[Placement, ...]
) -> DTensor:
    """Return the tensor of which ``local`` is this rank's part."""
    shape = torch.Size(parameter.shape)
    stride = (parameter.shape[1], 1) if len(shape) > 1 else (1,)
    return DTensor.from_local(local, mesh, spread, shape=shape, stride=stride, run_check=False)


class Read(NamedTuple):
    """A raw read: a whole buffer from a place in a file."""

    path: Path
    offset_bytes: int
    data: memoryview


class Bench:
    """One rank: memory to load into, and the ways to fill it."""

    def __init__(self, place: Place, megabytes: int, width: int) -> None:
        self.rank = place.rank
        self.directory = str(place.directory / "checkpoint")
        self.native_directory = str(place.directory / "step-00000001")
        self.state = [(p, slot) for p in parameters(megabytes, width) for slot in SLOTS]
        self.targets = [
            torch.ones(loaded_box(p, self.rank).shape, dtype=torch.float32) for p, _ in self.state
        ]
        self.needed_bytes = sum(target.nbytes for target in self.targets)

    def save(self) -> None:
        """Save with fsdp 4, by torch and by ourselves."""
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        pieces = [values(p, slot, saved_box(p, self.rank)) for p, slot in self.state]
        state = {
            key_of(p.fqn, slot): dtensor(p, piece, mesh, (Shard(0),))
            for (p, slot), piece in zip(self.state, pieces, strict=True)
        }
        dcp.save(state, checkpoint_id=self.directory)
        save_rank(
            LocalStore(),
            self.native_directory,
            step=1,
            attempt=1,
            rank=self.rank,
            world_size=NUM_RANKS,
            tensors=self.local(saved_box, pieces),
            extra={},
            param_groups=[],
            source={},
            fsync=False,
        )

    def local(
        self, box_of: Callable[[Parameter, int], Box], tensors: Sequence[torch.Tensor]
    ) -> list[LocalTensor]:
        """Return this rank's part of the state as our own functions take it."""
        return [
            LocalTensor(
                fqn=p.fqn,
                slot=slot,
                dtype="F32",
                shape=p.shape,
                box=box_of(p, self.rank),
                data=tensor.numpy().data,
            )
            for (p, slot), tensor in zip(self.state, tensors, strict=True)
        ]

    def raw_reads(self, directory: str, pattern: str) -> list[Read]:
        """Return raw reads of the bytes needed from the file that each rank saved."""
        reads: list[Read] = []
        left = [target.numpy().data.cast("B") for target in self.targets]
        for rank, path in enumerate(sorted(Path(directory).glob(pattern))):
            boxes = [
                (saved_box(p, rank).intersect(loaded_box(p, self.rank))) for p, _ in self.state
            ]
            num_bytes = sum(4 * box.num_elements for box in boxes if box)
            page = os.sysconf("SC_PAGE_SIZE")
            last = (path.stat().st_size - num_bytes) // page * page
            offset = last if self.rank % TP else 0
            stop = offset + num_bytes
            while offset < stop:
                size = min(stop - offset, len(left[0]), READ_BYTES)
                reads.append(Read(path, offset, left[0][:size]))
                left[0] = left[0][size:]
                left = left if left[0] else left[1:]
                offset += size
        assert not left
        return reads

    def laid_reads(self, directory: str, pattern: str) -> list[Read]:
        """Return reads of the bytes needed where they lie, but for what is between tensors."""
        reads: list[Read] = []
        for rank, path in enumerate(sorted(Path(directory).glob(pattern))):
            low = 0
            for (p, _), target in zip(self.state, self.targets, strict=True):
                saved, loaded = saved_box(p, rank), loaded_box(p, self.rank)
                if box := saved.intersect(loaded):
                    data = target.numpy().data.cast("B")
                    reads += _laid(path, low, data, saved, loaded, box)
                low += 4 * saved.num_elements
        return reads

    def ours(self, threads: int) -> None:
        """Open the checkpoint of DCP and load."""
        checkpoint = open_source(LocalStore(), self.directory)
        load(checkpoint, self.local(loaded_box, self.targets), threads=threads)

    def native(self, threads: int) -> None:
        """Open our own checkpoint and load."""
        checkpoint = open_checkpoint(LocalStore(), self.native_directory)
        load(checkpoint, self.local(loaded_box, self.targets), threads=threads)

    def dcp(self, *, alone: bool) -> None:
        """Load by torch, in place."""
        dcp.load(self.dtensors, checkpoint_id=self.directory, no_dist=alone)

    @functools.cached_property
    def dtensors(self) -> dict[str, Any]:
        """Return the targets as torch sees them."""
        mesh = init_device_mesh("cpu", (FSDP, TP), mesh_dim_names=("fsdp", "tp"))
        return {
            key_of(p.fqn, slot): dtensor(p, target, mesh, placements(p))
            for (p, slot), target in zip(self.state, self.targets, strict=True)
        }

    def check(self) -> None:
        """Stop if what was loaded is not what was saved; forget it."""
        for (p, slot), target in zip(self.state, self.targets, strict=True):
            expected = values(p, slot, loaded_box(p, self.rank))
            assert torch.equal(target.view(torch.int32), expected.view(torch.int32)), (p, slot)
            target.fill_(1)


def _laid(
    path: Path, low: int, data: memoryview, saved: Box, loaded: Box, box: Box
) -> Iterator[Read]:
    """Yield the reads of a box of a tensor that begins at byte ``low`` of a file."""
    # A row of one element where there are no columns.
    row, wide, own = (4 * math.prod(each.shape[1:]) for each in (box, saved, loaded))
    column = 4 * (box.start[1] - saved.start[1]) if len(box.shape) > 1 else 0
    first = low + (box.start[0] - saved.start[0]) * wide + column
    place, num_rows = (box.start[0] - loaded.start[0]) * own, box.shape[0]
    step = max(1, READ_BYTES // row) if row == wide else 1
    for number in range(0, num_rows, step):
        size = min(step, num_rows - number) * row
        start = place + number * own
        yield Read(path, first + number * wide, data[start : start + size])


def raw(reads: Sequence[Read], threads: int) -> None:
    """Read, by threads with equal parts of the list's bytes."""
    total, done = sum(len(read.data) for read in reads), 0
    parts: list[list[Read]] = [[] for _ in range(threads)]
    for read in reads:
        parts[done * threads // total].append(read)
        done += len(read.data)
    if threads == 1:
        _raw(reads)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(_raw, parts):
            pass


def _raw(reads: Sequence[Read]) -> None:
    for path, of_file in itertools.groupby(reads, key=lambda read: read.path):
        with path.open("rb", buffering=0) as file:
            for read in of_file:
                assert os.preadv(file.fileno(), [read.data], read.offset_bytes) == len(read.data)


def ways_of(bench: Bench) -> list[tuple[str, str, Callable[[], None]]]:
    """Return every way in every mode: mode, way, and what to call."""
    own_cores = max(1, (os.cpu_count() or 1) // NUM_RANKS)
    reads = bench.raw_reads(bench.directory, "*.distcp")
    rows = bench.laid_reads(bench.directory, "*.distcp")
    native_reads = bench.raw_reads(bench.native_directory, "*.bin")
    ways: list[tuple[str, str, Callable[[], None]]] = []
    for mode, threads in (("together", own_cores), ("alone, 1", 1), ("alone, 2", 2)):
        ways += [
            (mode, "raw", functools.partial(raw, reads, threads)),
            (mode, "rows", functools.partial(raw, rows, threads)),
            (mode, "ours", functools.partial(bench.ours, threads)),
            (mode, "dcp", functools.partial(bench.dcp, alone=mode != "together")),
            (mode, "native raw", functools.partial(raw, native_reads, threads)),
            (mode, "native", functools.partial(bench.native, threads)),
        ]
    return ways


def bench_rank(place: Place, *, megabytes: int, width: int, rounds: int) -> dict[str, Any]:
    """Save once and load in every way; return the seconds of this rank by way and round."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=NUM_RANKS)
    bench = Bench(place, megabytes, width)
    bench.save()
    assert bench.dtensors
    dist.barrier()
    ways = ways_of(bench)
    taken: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(rounds + 1):
        turn = number % len(ways)
        for mode, name, way in ways[turn:] + ways[:turn]:
            dist.barrier()
            if mode != "together" and place.rank:
                continue
            # The clock is one for all processes.
            cpu_s, begun_s = time.process_time(), time.monotonic()
            way()
            times = begun_s, time.monotonic(), time.process_time() - cpu_s
            # The first round pays for imports and for what is touched first.
            if number:
                taken.setdefault(f"{mode}/{name}", []).append(times)
            if name != "rows" and not name.endswith("raw"):
                bench.check()
    dist.destroy_process_group()
    return {"needed_bytes": bench.needed_bytes, "taken": taken}


def measure(megabytes: int, width: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return times and ratios by mode."""
    function = functools.partial(bench_rank, megabytes=megabytes, width=width, rounds=rounds)
    with running(function, NUM_RANKS, folder) as ranks:
        results = ranks.results(RUN_S_MAX)
    document: dict[str, Any] = {"rounds": rounds, "cores": os.cpu_count()}
    for name in results[0]["taken"]:
        mode, way = name.split("/")
        by_rank = [result["taken"][name] for result in results if name in result["taken"]]
        found = document.setdefault(mode, {"wall_s": {}, "cpu_s": {}})
        found["needed_bytes"] = sum(result["needed_bytes"] for result in results[: len(by_rank)])
        found["wall_s"][way] = [
            max(ended for _, ended, _ in times) - min(begun for begun, _, _ in times)
            for times in zip(*by_rank, strict=True)
        ]
        found["cpu_s"][way] = sum(min(cpu for _, _, cpu in times) for times in by_rank)
    for mode, found in document.items():
        if isinstance(found, dict):
            document[mode] = _summary(**found)
    return document


def _summary(
    needed_bytes: int, wall_s: dict[str, list[float]], cpu_s: dict[str, float]
) -> dict[str, Any]:
    medians = {way: statistics.median(times) for way, times in wall_s.items()}
    found: dict[str, Any] = {
        "needed_bytes": needed_bytes,
        "median_s": {way: round(value, 4) for way, value in medians.items()},
        "cpu_s": {way: round(value, 4) for way, value in cpu_s.items()},
    }
    for way, peers in PEERS.items():
        for peer in peers:
            pairs = zip(wall_s[peer], wall_s[way], strict=True)
            found[f"{way} vs {peer}"] = round(statistics.median(a / b for a, b in pairs), 2)
            found[f"{way} vs {peer}, cpu"] = round(cpu_s[peer] / cpu_s[way], 2)
    return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the whole state")
    parser.add_argument("--width", type=int, choices=HIDDEN, nargs="+", default=[2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", help="where to write; default: the system's temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[int, dict[str, Any]] = {}
    for width in options.width:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            results[width] = measure(options.megabytes, width, options.rounds, Path(folder))
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for width, result in results.items():
        print(f"decoder of width {width}")
        _print(result)


def _print(result: dict[str, Any]) -> None:
    print(f"fsdp {NUM_RANKS} -> fsdp {FSDP} x tp {TP}, {result['cores']} cores, medians of rounds")
    for mode, found in result.items():
        if not isinstance(found, dict):
            continue
        print(f"{mode}: {found['needed_bytes'] / 1e9:.3f} GB needed")
        for kind in ("median_s", "cpu_s"):
            print(f"  {kind:<9}" + ", ".join(f"{k} {v:.4f}" for k, v in found[kind].items()))
        ratios = (f"{key} {value:.2f}" for key, value in found.items() if " vs " in key)
        print("  " + "; ".join(ratios))


if __name__ == "__main__":
    main()
