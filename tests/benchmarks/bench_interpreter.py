"""The time that a snapshot takes from a training thread that is busy in Python.

    python -m tests.benchmarks interpreter [--preset 350m] [--rounds 20]

A loop of small operations of torch stands for a step whose host is the bottleneck, as with small
models on a GPU. It holds its update and takes a snapshot as a worker does, of a state on a
simulated device: a bus of 52 GB/s that needs no processor. All sizes are a sixteenth, those of
blocks and buckets too, so that Python has as much to do as for the whole state.

``lost_ms`` is how much longer a step takes with a snapshot than without. ``training_ms`` is the
processor time of the training thread for it, ``beside_ms`` that of the thread that completes it:
the most that it can take, which also holds on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.benchmarks.common import load_average
from tests.benchmarks.decoder_parts import SLOTS, assignment
from tests.benchmarks.steps import thread_s
from tests.support.node_memory import NodeProcess
from ucp_core.geometry import Box
from workers.memory import Mark, SnapshotMemory, checksums
from workers.models import PRESETS, Decoder, ModelShape
from workers.settings import Settings
from workers.snapshot import Captured, SnapshotWriter, buckets, buffer_layout, device, writing
from workers.state import StateEntry

SCALE: Final = 16
BUS_BYTES_A_S: Final = 52e9 / SCALE
#: Times of 350m in bfloat16 on an H100.
STEP_S: Final = 0.317
MICRO_BATCHES: Final = 2
#: A forward pass is told where it begins and ends, a backward pass where it begins.
MARKS_A_BLOCK: Final = 3
READY_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class At:
    """A place that the device reaches at a time of its own."""

    at_s: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.at_s - time.monotonic()))

    def is_reached(self) -> bool:
        return time.monotonic() >= self.at_s

    def since(self, other: Mark) -> float:
        assert isinstance(other, At)
        return self.at_s - other.at_s


class Bus:
    """A ``workers.memory.CopyStream`` that copies nothing, in the time that copies take."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def mark(self) -> Mark:
        return At(time.monotonic())

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        assert after is None or isinstance(after, At)
        begin_s = max(self._free_s, time.monotonic(), after.at_s if after else 0.0)
        num_bytes = sum(target.nbytes for target, _ in pairs)
        self._free_s = begin_s + num_bytes / BUS_BYTES_A_S
        return At(self._free_s)

    def hold(self, mark: Mark) -> None:
        mark.wait()

    def gap(self) -> None:
        pass


def state_of(shape: ModelShape) -> list[StateEntry]:
    """Return weights and moments of a sixteenth of the size."""
    with torch.device("meta"):
        model = Decoder(shape)
    sizes = {fqn: -(-each.numel() // SCALE) for fqn, each in model.named_parameters()}
    return [
        StateEntry(
            fqn=fqn, slot=slot, shape=(size,), box=Box.full((size,)), tensor=torch.ones(size)
        )
        for slot in SLOTS
        for fqn, size in sizes.items()
    ]


def operations(count: int) -> None:
    """Do what stands for launching kernels."""
    tensor = torch.zeros(16, 16)
    for _ in range(count):
        tensor.add_(1)


class Steps:
    """Steps of a worker that takes snapshots, and those of one that does not."""

    def __init__(
        self, writer: SnapshotWriter, shape: ModelShape, entries: list[StateEntry], *, passes: bool
    ) -> None:
        self._writer, self._entries, self._passes = writer, entries, passes
        self._num_marks = MICRO_BATCHES * MARKS_A_BLOCK * shape.num_layers
        self._names = sorted({entry.fqn for entry in entries})
        self._number = 0
        assert writer.get_ready(self._state(), time.monotonic() + READY_S_MAX), "no memory"
        begun_s = time.perf_counter()
        operations(20_000)
        self._count = round(20_000 * STEP_S / (time.perf_counter() - begun_s) / self._num_marks)

    def run(self, *, snapshot: bool) -> dict[str, float]:
        """Return the seconds of a step, and those of processors that the snapshot took."""
        # An update has just had all of them.
        assert all(entry.tensor.data_ptr() for entry in self._entries)
        beside_s, training_s = thread_s("snapshot"), 0.0
        begun_s = time.perf_counter()
        if snapshot:
            self._number += 1
            used_s = time.thread_time()
            assert self._writer.capture(self._state()), "no memory"
            self._writer.complete(pin=False)
            training_s += time.thread_time() - used_s
        for number in range(self._num_marks):
            operations(self._count)
            if self._passes:
                self._writer.device_copy.passed(ends=number % MARKS_A_BLOCK == 1)
        self._writer.device_copy.hold_update()
        took_s = time.perf_counter() - begun_s
        if snapshot:
            assert self._writer.wait(self._number), "the snapshot was not completed"
        beside_s = thread_s("snapshot") - beside_s
        return {"step": took_s, "training": training_s, "beside": beside_s}

    def _state(self) -> Captured:
        group = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "params": self._names}
        return Captured(
            step=self._number, entries=self._entries, extra={"loss": 1.0}, param_groups=[group]
        )


def scale_down() -> None:
    """Make blocks and buckets smaller, by as much as the state."""
    rooms: tuple[Any, ...] = (buffer_layout, buckets, device, writing, checksums)
    for room in rooms:
        for name in ("BLOCK_BYTES", "BUCKET_BYTES", "_BUFFER_BYTES_MIN", "_ASKED_BYTES_MIN"):
            if hasattr(room, name):
                setattr(room, name, getattr(room, name) // SCALE)
    # As of tensors that are on a device.
    host: Any = buffer_layout.HostTensors
    host.views = lambda _self: None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="350m", choices=PRESETS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--passes", action="store_true", help="tell passes, as a stage does")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale_down()
    shape = PRESETS[options.preset]
    entries = state_of(shape)
    with tempfile.TemporaryDirectory() as folder:
        node = NodeProcess("node", Path(folder), Path(folder) / "run", Settings())
        memory = SnapshotMemory(Path(folder), "w0000")
        writer = SnapshotWriter(
            memory, assignment(0, 1), fenced=lambda: False, told=lambda: None, stream=Bus()
        )
        try:
            steps = Steps(writer, shape, entries, passes=options.passes)
            found = [
                (steps.run(snapshot=False), steps.run(snapshot=True)) for _ in range(options.rounds)
            ][1:]
        finally:
            writer.close()
            memory.leave()
            node.kill()
    lost_ms = sorted(1e3 * (taken["step"] - plain["step"]) for plain, taken in found)
    ms = {
        name: round(1e3 * statistics.median(taken[name] for _, taken in found), 2)
        for name in ("training", "beside")
    }
    print(
        json.dumps(
            {
                "tensors": len(entries),
                "step_ms": round(1e3 * statistics.median(plain["step"] for plain, _ in found)),
                "lost_ms": round(statistics.median(lost_ms), 2),
                "lost_ms_quartiles": [round(lost_ms[len(lost_ms) * n // 4], 2) for n in (1, 3)],
                "training_ms": ms["training"],
                "beside_ms": ms["beside"],
                "load": load_average(),
            }
        )
    )


if __name__ == "__main__":
    main()
