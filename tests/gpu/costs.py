"""Measures snapshots and the session on a device for one worker, and delays of pinning memory."""

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch

from tests.benchmarks.bare_loop import compare
from tests.benchmarks.bench_snapshot_gpu import TENSOR_BYTES, measure_copies
from tests.benchmarks.bench_snapshot_steps import run_ours
from tests.benchmarks.snapshot_ways import WAYS
from tests.benchmarks.steps import Job
from tests.gpu.parts import Lab
from tests.gpu.rows import tell
from tests.support.node_memory import NodeProcess
from workers.models import PRESETS
from workers.settings import Settings
from workers.snapshot import SnapshotMemory

#: Shares of torch's own pinned memory, of a step's time and of a bare loop's step; and seconds.
COPY_MIN, SNAPSHOT_MAX, SESSION_MAX, PINNING_S_MAX = 0.90, 0.01, 1.01, 0.5
#: Bytes of the state whose memory is pinned.
PINNED_BYTES: Final = 10_000_000_000


def _job(
    lab: Lab,
    ways: tuple[str, ...],
    *,
    rounds: int,
    block: int,
    preset: str = "350m",
    compiled: bool = False,
    probes: bool = False,
) -> Job:
    """Return a training in bfloat16, of steps as a GPU has them."""
    if lab.on_cpu:
        return Job(shape=PRESETS["tiny"], workers=1, global_batch=4, rounds=1, block=2, ways=ways,
                   probes=probes)  # fmt: skip
    return Job(
        shape=PRESETS[preset], workers=1, global_batch=32, micro_batch=16, sequence_length=512,
        precision="bf16", compiled=compiled, rounds=rounds, block=block, ways=ways, probes=probes,
    )  # fmt: skip


def snapshot(lab: Lab) -> None:
    """Tell how fast snapshots leave the device, and what one after every step costs."""
    num_bytes = (1 if lab.on_cpu else 32) * TENSOR_BYTES
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device(lab.device)
        copied = measure_copies(device, Path(folder), num_bytes=num_bytes, rounds=2)
    of_pinned = copied["of_pinned"]["median"]
    tell("snapshot", "copy into the keeper's memory over torch's pinned memory",
         f"{of_pinned:.2f} ({copied['pinned_gb_per_s']:.0f} GB/s)", ">= 0.90",
         ok=of_pinned >= COPY_MIN)  # fmt: skip
    if not lab.full:
        # In a block of two steps the second one is measured, beside a snapshot or none.
        _after_every_step(lab, _job(lab, ("none", "snapshots"), rounds=20, block=2), "350m")
        return
    for preset, rounds in (("350m", 12), ("1b", 5)):
        job = _job(lab, WAYS, rounds=rounds, block=3, preset=preset, probes=True)
        for way, told in _after_every_step(lab, job, preset).items():
            tell("snapshot", f"{preset}, {way}", _words(told))


def _after_every_step(lab: Lab, job: Job, preset: str) -> dict[str, dict[str, float]]:
    """Tell what a snapshot after every step costs; return what was seen of each way."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ours(job, Path(folder), copies=False)
    wall = found["snapshots"]["wall"]
    cost, sure = wall["median"], wall["sure"]
    seen = f"{cost:.2%} of {found['step_ms']['none']:.0f} ms, sure {sure[0]:.2%} to {sure[1]:.2%}"
    is_cheap = None if lab.on_cpu else cost <= SNAPSHOT_MAX
    tell("snapshot", f"a snapshot after every step of {preset}", seen, "<= 1 %", ok=is_cheap)
    taken, asked = found["taken"], found["asked"]
    tell("snapshot", "snapshots taken of asked", f"{taken} of {asked}", "all", ok=taken == asked)
    beside_ms = found["beside_ms"]["snapshots"]
    tell("snapshot", "in the training thread, and in the one beside it, a step",
         f"{found['stall_ms']:.1f} ms, {beside_ms} ms of the processor")  # fmt: skip
    ways: dict[str, dict[str, float]] = found.get("ways", {})
    for way in job.ways[1:] if ways else ():
        ways[way]["cost"] = found[way]["wall"]["median"]
    return ways


def _words(told: dict[str, float]) -> str:
    """Return what was seen of a way to take snapshots, as a cell of the table."""
    return (
        f"{told.get('cost', 0.0):+.1%}; step p50 {told['step_ms']:.0f} ms, p99 "
        f"{told['step_p99_ms']:.0f} ms; small copies p50 {told['small_ms']:.3f} ms, p99 "
        f"{told['small_p99_ms']:.3f} ms; {told['gb_per_s']:.1f} GB/s; a step has "
        f"{told['pieces']:.0f} pieces, {told['pauses']:.0f} pauses, {told['yields']:.0f} yields of "
        f"{told['yielding_ms']:.1f} ms, {told['held_ms']:.1f} ms of the interpreter; "
        f"{told['taken']:.0f} of {told['asked']:.0f} taken"
    )


def overhead(lab: Lab) -> None:
    """Tell what a step of a session takes over one of a bare FSDP2 loop."""
    for compiled in (False, True):
        job = _job(lab, ("bare", "session"), rounds=6, block=5, compiled=compiled)
        with tempfile.TemporaryDirectory() as folder:
            found = compare(job, "tiny" if lab.on_cpu else "350m", Path(folder))
        ratio = found["session_of_bare"]["wall"]
        seen = (
            f"{ratio['median']:.3f} ({ratio['quartile_low']:.3f} to {ratio['quartile_high']:.3f})"
        )
        what = f"step of a session over a bare loop, compile {'on' if compiled else 'off'}"
        tell("overhead", f"{what}, {found['step_ms']['bare']:.0f} ms", seen, "<= 1.01",
             ok=None if lab.on_cpu else ratio["median"] <= SESSION_MAX)  # fmt: skip


def pinning(lab: Lab) -> None:
    """Tell how long steps pause while the memory of a large state is registered with the driver."""
    size = TENSOR_BYTES if lab.on_cpu else PINNED_BYTES
    side = 128 if lab.on_cpu else 2048
    left = torch.ones(side, side, device=lab.device)

    def step_s() -> float:
        begun_s = time.perf_counter()
        for _ in range(10):
            torch.mm(left, left)
        left[0, 0].item()
        return time.perf_counter() - begun_s

    usual_s = statistics.median(step_s() for _ in range(20))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = NodeProcess("node-a", folder / "node-a", folder / "run", Settings())
        memory = SnapshotMemory(folder / "node-a", "w0000")

        def pin() -> None:
            begun_s = time.perf_counter()
            memory.ensure(size, attempt=1, for_cuda=not lab.on_cpu)
            found["took_s"] = time.perf_counter() - begun_s

        thread = threading.Thread(target=pin)
        steps_s: list[float] = []
        try:
            thread.start()
            while thread.is_alive():
                steps_s.append(step_s())
            thread.join()
        finally:
            memory.leave()
            node.kill()
    delay_s = max(0.0, sum(steps_s) - usual_s * len(steps_s))
    longest_s = max([usual_s, *steps_s]) - usual_s
    seen = f"{delay_s:.2f} s in all, {longest_s:.2f} s at most, of {found['took_s']:.1f} s"
    tell("pinning", f"steps delayed while a state of {size / 1e9:.0f} GB is pinned three times",
         seen, "<= 0.5 s", ok=longest_s <= PINNING_S_MAX)  # fmt: skip
