"""Snapshots from a CUDA device: the speed of the copy, and the cost of one after every step.

    python -m tests.benchmarks snapshot_gpu [--preset 1b] [--rounds 6] [--block 8]

``copy`` moves the same tensors off the device, in turn into torch's own pinned memory and into a
buffer of a keeper's memory that is registered with the driver; ``of_pinned`` compares the speeds.
``steps`` trains a decoder on the device without and with a snapshot after every step, in turn, as
``bench_snapshot_steps`` does. The preset 1b needs 20 GB on the device and 45 GB of memory for three
snapshots. Without a CUDA device the benchmark says so and measures nothing.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from tests.benchmarks.bench_snapshot_steps import run_ours
from tests.benchmarks.common import load_average, paired
from tests.benchmarks.steps import Job
from tests.support.node_memory import NodeProcess
from workers.memory import Credits
from workers.models import PRESETS, num_parameters
from workers.settings import Settings
from workers.snapshot import SnapshotMemory
from workers.snapshot.device import DeviceCopy
from workers.snapshot.writing import BLOCK_BYTES

#: Issue of this part: of a pinned copy's speed, and of a step.
COPY_TARGET: Final = 0.90
STEP_TARGET: Final = 0.01
#: Bytes of a weight, its gradient and its two moments.
BYTES_A_PARAMETER: Final = 16
TENSOR_BYTES: Final = 64 << 20


def measure_copies(device: torch.device, folder: Path, *, num_bytes: int, rounds: int) -> Any:
    """Return how fast a buffer of keeper's memory takes tensors, beside torch's pinned memory."""
    node = NodeProcess("node-a", folder / "node-a", folder / "run", Settings())
    memory = SnapshotMemory(folder / "node-a", "w0000")
    try:
        arena = memory.ensure(num_bytes, attempt=1, for_cuda=device.type == "cuda")
        is_cuda = device.type == "cuda"
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        buffer = torch.frombuffer(arena.body(0), dtype=torch.uint8)[:num_bytes]
        sources = list(torch.ones(num_bytes, dtype=torch.uint8, device=device).split(TENSOR_BYTES))
        seconds: dict[str, list[float]] = {"pinned": [], "buffer": []}
        for _ in range(rounds + 1):
            for name, target in (("pinned", pinned), ("buffer", buffer)):
                copy = DeviceCopy(Credits(folder / "node-a"), BLOCK_BYTES)
                begun_s = time.perf_counter()
                copy.begin(list(target.split(TENSOR_BYTES)), sources, num_checked=0)
                copy.run(())
                seconds[name].append(time.perf_counter() - begun_s)
        del buffer
    finally:
        memory.leave()
        node.kill()
    # The first of each meets fresh pages.
    of_pinned = paired(seconds["pinned"][1:], seconds["buffer"][1:])
    return {
        "gigabytes": num_bytes / 1e9,
        "pinned_gb_per_s": round(num_bytes / 1e9 / min(seconds["pinned"]), 2),
        "of_pinned": of_pinned,
        "missed": of_pinned["median"] < COPY_TARGET,
    }


def measure_steps(folder: Path, job: Job) -> dict[str, Any]:
    """Return what snapshots cost the steps of one worker."""
    found = run_ours(job, folder, copies=False)
    found["missed"] = found["snapshots"]["wall"]["median"] > STEP_TARGET
    return found


def main() -> None:
    """Print one JSON object a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="1b", choices=PRESETS)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="for the copies")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=8, help="steps of each kind in a round")
    parser.add_argument("--batch", type=int, default=64, help="samples a step")
    parser.add_argument("--on-cpu", action="store_true", help="to try the script itself")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.on_cpu:
        print(json.dumps({"skipped": "no CUDA device: this measures copies off one"}))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = int(options.gigabytes * 1e9) // TENSOR_BYTES * TENSOR_BYTES
    with tempfile.TemporaryDirectory() as folder:
        copies = measure_copies(device, Path(folder), num_bytes=num_bytes, rounds=options.rounds)
    print(json.dumps({"run": "copy", **copies, "load": load_average()}), flush=True)
    shape = PRESETS[options.preset]
    job = Job(
        shape=shape,
        workers=1,
        global_batch=options.batch,
        rounds=options.rounds,
        block=options.block,
        ways=("none", "snapshots"),
    )
    filled_gb = num_parameters(shape) * BYTES_A_PARAMETER / 1e9
    with tempfile.TemporaryDirectory() as folder:
        steps = measure_steps(Path(folder), job)
    head = {"run": "steps", "preset": options.preset, "filled_gigabytes": round(filled_gb, 1)}
    print(json.dumps({**head, **steps, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
