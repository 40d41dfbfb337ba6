"""Loading a torch DCP checkpoint under another layout: ours, DCP's own load, and raw reads.

Four processes save a decoder's weights and Adam moments under fsdp 4, as FSDP2 lays them out;
then the four are fsdp 2 x tp 2 and load: in ``ours``, which opens the checkpoint and loads; by
``dcp.load`` into DTensors; and by plain reads of as many bytes as a rank needs, 8 MiB a call into
warm memory, by one thread. ``alone`` is one rank while the others wait, ours with two threads as
by default. ``together`` is all ranks at once, ours with as many threads as each has cores of its
own; it lasts as long as the slowest. The ways take turns in every round, the page cache is warm,
and every result is compared with what was saved.

Medians and the best. CPU seconds, the best of the rounds and all ranks added, stand beside them:
they tell most where the machine has other work.

    python -m tests.benchmarks.bench_load --megabytes 1024 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.ranks import Place, running
from ucp_core.boxes import Box
from ucp_core.checkpoint import LocalTensor, load
from ucp_core.converters import open_source
from ucp_core.storage import LocalStore

NUM_RANKS, FSDP, TP = 4, 2, 2
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
MODEL, HIDDEN = 2048, 8192
READ_BYTES = 8 << 20
RUN_S_MAX = 1800


class Parameter(NamedTuple):
    """A parameter and the dim that tensor parallelism cuts."""

    fqn: str
    shape: tuple[int, ...]
    cut: int | None


def parameters(megabytes: int) -> list[Parameter]:
    """Return the parameters of a decoder whose state has about ``megabytes``."""
    block = {
        "attention.wq": ((MODEL, MODEL), 0),
        "attention.wk": ((MODEL, MODEL), 0),
        "attention.wv": ((MODEL, MODEL), 0),
        "attention.wo": ((MODEL, MODEL), 1),
        "feed_forward.w1": ((HIDDEN, MODEL), 0),
        "feed_forward.w2": ((MODEL, HIDDEN), 1),
        "feed_forward.w3": ((HIDDEN, MODEL), 0),
        "norm": ((MODEL,), None),
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
    rows = torch.arange(box.start[0], box.stop[0], dtype=torch.float32)
    if len(box.start) == 1:
        return rows + seed
    columns = torch.arange(box.start[1], box.stop[1], dtype=torch.float32)
    return rows[:, None] * parameter.shape[1] + columns + seed


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


class Bench:
    """One rank: memory to load into, and the ways to fill it."""

    def __init__(self, place: Place, megabytes: int) -> None:
        self.rank = place.rank
        self.directory = str(place.directory / "checkpoint")
        self.state = [(p, slot) for p in parameters(megabytes) for slot in SLOTS]
        self.targets = [
            torch.ones(loaded_box(p, self.rank).shape, dtype=torch.float32) for p, _ in self.state
        ]
        self.needed_bytes = sum(target.nbytes for target in self.targets)
        self.buffer = np.ones(READ_BYTES, np.uint8)
        self.raw_target = np.ones(self.needed_bytes, np.uint8)

    def save(self) -> None:
        """Save with fsdp 4."""
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        state = {
            key_of(p.fqn, slot): dtensor(
                p, values(p, slot, saved_box(p, self.rank)), mesh, (Shard(0),)
            )
            for p, slot in self.state
        }
        dcp.save(state, checkpoint_id=self.directory)

    def raw(self) -> None:
        """Read as many bytes as are needed, one after the other."""
        files = sorted(Path(self.directory).glob("*.distcp"))
        view, done = self.raw_target.data, 0
        for name in files[self.rank :] + files[: self.rank]:
            with name.open("rb", buffering=0) as file:
                while done < len(view):
                    size = file.readinto(view[done : done + READ_BYTES])
                    if not size:
                        break
                    done += size
        assert done == len(view)

    def ours(self, threads: int) -> None:
        """Open the checkpoint and load."""
        checkpoint = open_source(LocalStore(), self.directory)
        need = [
            LocalTensor(
                fqn=p.fqn,
                slot=slot,
                dtype="F32",
                shape=p.shape,
                box=loaded_box(p, self.rank),
                data=target.numpy().data,
            )
            for (p, slot), target in zip(self.state, self.targets, strict=True)
        ]
        load(checkpoint, need, threads=threads)

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
            assert torch.equal(target, values(p, slot, loaded_box(p, self.rank))), (p.fqn, slot)
            target.fill_(1)


def bench_rank(place: Place, *, megabytes: int, rounds: int) -> dict[str, Any]:
    """Save once and load in every way; return the seconds of this rank by way and round."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=NUM_RANKS)
    bench = Bench(place, megabytes)
    bench.save()
    assert bench.dtensors
    own_cores = max(1, (os.cpu_count() or 1) // NUM_RANKS)
    ways: list[tuple[str, Callable[[], None]]] = [
        ("together raw", bench.raw),
        ("together ours", functools.partial(bench.ours, own_cores)),
        ("together dcp", functools.partial(bench.dcp, alone=False)),
        ("alone raw", bench.raw),
        ("alone ours", functools.partial(bench.ours, 2)),
        ("alone dcp", functools.partial(bench.dcp, alone=True)),
    ]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in ways}
    for number in range(rounds + 1):
        turn = number % len(ways)
        for name, way in ways[turn:] + ways[:turn]:
            dist.barrier()
            if name.startswith("alone") and place.rank:
                continue
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            way()
            times = time.perf_counter() - wall_s, time.process_time() - cpu_s
            # The first round pays for imports and for what is touched first.
            if number:
                taken[name].append(times)
            if not name.endswith("raw"):
                bench.check()
    dist.destroy_process_group()
    return {"needed_bytes": bench.needed_bytes, "taken": taken}


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return times, speeds and ratios."""
    function = functools.partial(bench_rank, megabytes=megabytes, rounds=rounds)
    with running(function, NUM_RANKS, folder) as ranks:
        results = ranks.results(RUN_S_MAX)
    sizes = [result["needed_bytes"] for result in results]
    document: dict[str, Any] = {"rounds": rounds, "cores": os.cpu_count()}
    for mode, needed_bytes in (("together", sum(sizes)), ("alone", sizes[0])):
        wall_s: dict[str, list[float]] = {}
        cpu_s: dict[str, float] = {}
        for way in ("raw", "ours", "dcp"):
            by_rank = [taken for r in results if (taken := r["taken"][f"{mode} {way}"])]
            wall_s[way] = [max(w for w, _ in times) for times in zip(*by_rank, strict=True)]
            cpu_s[way] = sum(min(cpu for _, cpu in times) for times in by_rank)
        document[mode] = _summary(needed_bytes, wall_s, cpu_s)
    return document


def _summary(
    needed_bytes: int, wall_s: dict[str, list[float]], cpu_s: dict[str, float]
) -> dict[str, Any]:
    found: dict[str, Any] = {"needed_bytes": needed_bytes}
    kinds = {
        "median_s": {way: statistics.median(times) for way, times in wall_s.items()},
        "best_s": {way: min(times) for way, times in wall_s.items()},
        "cpu_s": cpu_s,
    }
    for kind, seconds in kinds.items():
        found[kind] = {way: round(value, 4) for way, value in seconds.items()}
        found[f"ours_vs_raw {kind}"] = round(seconds["raw"] / seconds["ours"], 2)
        found[f"ours_vs_dcp {kind}"] = round(seconds["dcp"] / seconds["ours"], 2)
    return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the whole state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write; default: the system's temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        result = measure(options.megabytes, options.rounds, Path(folder))
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"fsdp {NUM_RANKS} -> fsdp {FSDP} x tp {TP}, {result['cores']} cores")
    for mode in ("together", "alone"):
        found = result[mode]
        print(f"{mode}: {found['needed_bytes'] / 1e9:.3f} GB needed")
        for kind in ("median_s", "best_s", "cpu_s"):
            times = ", ".join(f"{way} {value:.4f}" for way, value in found[kind].items())
            raw, peer = found[f"ours_vs_raw {kind}"], found[f"ours_vs_dcp {kind}"]
            print(f"  {kind:<9} {times}; ours {raw:.2f} x raw, {peer:.2f} x dcp")


if __name__ == "__main__":
    main()
