"""Saving and loading, beside raw writes and reads and beside torch's distributed checkpoint.

    python -m tests.benchmarks checkpoint --megabytes 12 256 --rounds 7 --json
    python -m tests.benchmarks checkpoint --torchrun --megabytes 1000 --rounds 9

One process, warm page cache, fresh files. With ``--fsync`` every way forces its files to the disk,
otherwise none does. The ways take turns in every round, each first in another round, and each
deletes the files that it wrote before: all get pages that were used already, because the first use
of a page costs a virtual machine several times the write.

Loads use as many threads as a program gets by default; ``load_1`` uses one, like the raw read.
``shrink`` saves with 4 ranks and loads as rank 0 of 3. Speeds and ratios are of the best round,
because other work on the machine only adds; medians stand beside them.

``--torchrun`` measures what a plain script under torchrun sees: ``torchrun_checkpoint``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from ucp_core.geometry import Box
from ucp_core.native import LocalTensor, find_committed, load, open_checkpoint, save_rank
from ucp_core.storage import LocalStore, join

SLOTS = ("weight", "exp_avg", "exp_avg_sq")
COLUMNS = 512
NUM_RANKS = 4


class Bench:
    """A state of fp32 tensors with two optimizer slots, and the ways to keep it."""

    def __init__(self, megabytes: int, root: Path, *, fsync: bool) -> None:
        self.root = root
        self.fsync = fsync
        self.store = LocalStore()
        tensors_max = max(4, min(64, megabytes // 4))
        rows = max(NUM_RANKS, megabytes * 10**6 // (4 * COLUMNS * len(SLOTS) * tensors_max))
        generator = np.random.default_rng(0)
        self.state = {
            (f"layers.{index}", slot): generator.standard_normal((rows, COLUMNS), np.float32)
            for index in range(tensors_max)
            for slot in SLOTS
        }
        self.target = {key: np.ones_like(array) for key, array in self.state.items()}
        self.num_bytes = sum(array.nbytes for array in self.state.values())

    def local(self, arrays: dict[tuple[str, str], Any], rank: int, of: int) -> list[LocalTensor]:
        """Return the rows of ``rank``."""
        found: list[LocalTensor] = []
        for (fqn, slot), array in arrays.items():
            box = Box.full(array.shape).split(0, of)[rank]
            part = array[box.start[0] : box.stop[0]]
            found.append(
                LocalTensor(
                    fqn=fqn, slot=slot, dtype="F32", shape=array.shape, box=box, data=part.data
                )
            )
        return found

    def raw_write(self) -> None:
        """Write the bytes and nothing else, 1 MiB a call."""
        (self.root / "raw").mkdir(parents=True, exist_ok=True)
        with (self.root / "raw/data").open("wb", buffering=0) as file:
            for array in self.state.values():
                view = array.data.cast("B")
                for low in range(0, len(view), 1 << 20):
                    file.write(view[low : low + (1 << 20)])
            if self.fsync:
                os.fsync(file.fileno())

    def raw_read(self) -> None:
        """Read the bytes into place and nothing else, 2 MiB a call."""
        with (self.root / "raw/data").open("rb", buffering=0) as file:
            offset = 0
            for array in self.target.values():
                view = array.data.cast("B")
                for low in range(0, len(view), 2 << 20):
                    part = view[low : low + (2 << 20)]
                    assert os.preadv(file.fileno(), [part], offset) == len(part)
                    offset += len(part)

    def save(self, world_size: int = 1) -> None:
        """Save by every rank in turn."""
        for rank in range(world_size):
            save_rank(
                self.store,
                str(self.root / f"of{world_size}/step-00000001"),
                step=1,
                attempt=1,
                rank=rank,
                world_size=world_size,
                tensors=self.local(self.state, rank, world_size),
                extra={},
                param_groups=[],
                source={},
                fsync=self.fsync,
            )

    def load(self, threads: int = 2) -> None:
        """Load everything that one rank saved."""
        opened = open_checkpoint(self.store, str(self.root / "of1/step-00000001"))
        load(opened, self.local(self.target, 0, 1), threads=threads)

    def shrink(self) -> None:
        """Find, open and load as rank 0 of 3 what 4 ranks saved."""
        found = find_committed(self.store, join(str(self.root), "of4"), lineage=[(1, 0)])
        assert found is not None
        load(found.checkpoint, self.local(self.target, 0, 3))

    def dcp_save(self) -> None:
        """Save by torch, also by one process."""
        writer = dcp.FileSystemWriter(self.root / "dcp", sync_files=self.fsync)
        dcp.save(self._torch(self.state), storage_writer=writer, no_dist=True)

    def dcp_load(self) -> None:
        """Load by torch, in place."""
        dcp.load(self._torch(self.target), checkpoint_id=str(self.root / "dcp"), no_dist=True)

    def _torch(self, arrays: dict[tuple[str, str], Any]) -> dict[str, Any]:
        return {f"{fqn}.{slot}": torch.from_numpy(array) for (fqn, slot), array in arrays.items()}

    def check(self) -> None:
        """Stop if the last full load was not exact."""
        for key, array in self.state.items():
            assert np.array_equal(array, self.target[key]), key
            self.target[key][:] = 1

    def clear(self, name: str) -> None:
        """Remove what one way wrote, so that it makes new files."""
        shutil.rmtree(self.root / name, ignore_errors=True)


def measure(megabytes: int, rounds: int, root: Path, *, fsync: bool) -> dict[str, Any]:
    """Return seconds, GB/s and ratios for one size."""
    bench = Bench(megabytes, root, fsync=fsync)
    ways: list[tuple[str, Callable[[], None]]] = [
        ("raw_write", bench.raw_write),
        ("save", bench.save),
        ("dcp_save", bench.dcp_save),
        ("raw_read", bench.raw_read),
        ("load", bench.load),
        ("load_1", partial(bench.load, threads=1)),
        ("dcp_load", bench.dcp_load),
        ("shrink", bench.shrink),
    ]
    written = {"raw_write": "raw", "save": "of1", "dcp_save": "dcp"}
    for _, way in ways[:3]:
        way()
    bench.save(NUM_RANKS)
    times: dict[str, list[float]] = {name: [] for name, _ in ways}
    for number in range(rounds + 1):
        turn = number % len(ways)
        for name, way in ways[turn:] + ways[:turn]:
            if name in written:
                bench.clear(written[name])
            begun = time.perf_counter()
            way()
            seconds = time.perf_counter() - begun
            # The first round pays for first touches and imports.
            if number:
                times[name].append(seconds)
            if name in {"raw_read", "load", "load_1", "dcp_load"}:
                bench.check()
    best = {name: min(values) for name, values in times.items()}
    return {
        "bytes": bench.num_bytes,
        "tensors": len(bench.state),
        "rounds": rounds,
        "best_ms": {name: round(value * 1e3, 3) for name, value in best.items()},
        "median_ms": {
            name: round(statistics.median(values) * 1e3, 3) for name, values in times.items()
        },
        "gb_per_s": {
            name: round(bench.num_bytes / value / 1e9, 2)
            for name, value in best.items()
            if name != "shrink"
        },
        "save_vs_raw_write": round(best["raw_write"] / best["save"], 2),
        "load_vs_raw_read": round(best["raw_read"] / best["load"], 2),
        "load_1_vs_raw_read": round(best["raw_read"] / best["load_1"], 2),
        "save_vs_dcp": round(best["dcp_save"] / best["save"], 2),
        "load_vs_dcp": round(best["dcp_load"] / best["load"], 2),
    }


def under_torchrun(options: argparse.Namespace) -> int:
    """Measure by ``torchrun_checkpoint``; return the exit status."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    words = [f"--rounds={options.rounds}", *(["--json"] if options.json else [])]
    words += [f"--directory={options.directory}"] if options.directory else []
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    for megabytes in options.megabytes or (1000,):
        module = ["-m", "tests.benchmarks.torchrun_checkpoint", f"--megabytes={megabytes}"]
        command = [sys.executable, "-m", *launcher, *module, *words]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status:
            return status
    return 0


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", help="default: 12 256, or 1000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fsync", action="store_true", help="all ways write to the disk")
    parser.add_argument("--directory", help="where to write; default: the system's temporary one")
    parser.add_argument("--torchrun", action="store_true", help="in a script under torchrun")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, help="with --torchrun")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.torchrun:
        sys.exit(under_torchrun(options))
    torch.set_num_threads(1)
    results = {}
    for megabytes in options.megabytes or (12, 256):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            results[str(megabytes)] = measure(
                megabytes, options.rounds, Path(folder) / "bench", fsync=options.fsync
            )
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for megabytes, result in results.items():
        print(f"{megabytes} MB in {result['tensors']} tensors, {result['rounds']} rounds")
        for name, value in result["best_ms"].items():
            speed = result["gb_per_s"].get(name)
            text = f"  {name:<10} best {value:9.2f} ms, median {result['median_ms'][name]:9.2f} ms"
            print(text + (f", {speed:6.2f} GB/s" if speed else ""))
        for name, value in result.items():
            if "_vs_" in name:
                print(f"  {name:<18} {value:5.2f} x")


if __name__ == "__main__":
    main()
