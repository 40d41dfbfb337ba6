"""A small FSDP training loop in real processes, watched from outside as a keeper does."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from orchestrator.detection import Detector, Hang, Limits, judge, limits_from, observe
from tests.support.ranks import Place, Ranks, until
from workers import collectives
from workers.protocol import NodeReport, WorkerPhase
from workers.telemetry import ProgressRecord, RingReader, read_progress, report_on

NUM_RANKS = 4
WORKERS = tuple(f"w{rank}" for rank in range(NUM_RANKS))
LOOK_S = 0.1
#: Longer than hangs of steps like these go unnoticed, and shorter than a held process is left.
_HELD_US = 5_500_000


def stall_path(directory: Path, rank: int) -> Path:
    """Return the file that keeps ``rank`` in its forward pass while it exists.

    It sleeps there in C with the interpreter's lock, and computes if the file is not empty.
    """
    return directory / f"stall-{rank}"


def train(place: Place) -> int:
    """Train on a 2 x 2 mesh until the file ``stop`` appears; return the number of steps."""
    page = ProgressRecord.create(place.progress_path, worker=f"w{place.rank}")
    page.assign(1, place.rank)
    page.enter(WorkerPhase.FORMING)
    collectives.form(**place.formation(1, NUM_RANKS))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    step, stops = 0, torch.zeros(1)
    while stops.item() == 0:
        start_s = time.monotonic()
        page.enter(WorkerPhase.FORWARD)
        stall = stall_path(place.directory, place.rank)
        # It may go at any time.
        with suppress(FileNotFoundError):
            while True:
                if not stall.stat().st_size:
                    ctypes.PyDLL(None).usleep(_HELD_US)
        loss = model(torch.ones(8, 64)).square().mean()
        page.enter(WorkerPhase.BACKWARD)
        loss.backward()
        page.enter(WorkerPhase.UPDATING)
        optimizer.step()
        optimizer.zero_grad()
        stops = torch.tensor([float((place.directory / "stop").exists())])
        dist.all_reduce(stops)
        step += 1
        page.completed(step, time.monotonic() - start_s, loss.item())
    page.enter(WorkerPhase.LEAVING)
    del model, optimizer, loss, mesh
    collectives.leave()
    page.close()
    return step


class Watch:
    """The keeper and the detector in one, on four processes of ``train``."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._detector = Detector()
        self._seq = 0

    def look(self) -> Hang | None:
        """Take in what is to be seen now; return the verdict on it."""
        now_ns = time.monotonic_ns()
        self._seq += 1
        report = NodeReport(
            node="n0",
            seq=self._seq,
            workers=tuple(
                report_on(
                    worker,
                    read_progress(place.progress_path),
                    RingReader(place.ring_path).look(now_ns=now_ns),
                    now_ns=now_ns,
                )
                for worker, place in zip(WORKERS, self._ranks.places, strict=True)
                if place.progress_path.exists()
            ),
        )
        self._detector = observe(self._detector, report, now_ns / 1e9)
        verdict = judge(
            self._detector, now_ns / 1e9, attempt=1, members=WORKERS, limits=self.limits
        )
        assert verdict is None or isinstance(verdict, Hang)
        return verdict

    @property
    def limits(self) -> Limits:
        """Return the bounds for the steps seen so far."""
        seen = self._detector
        return limits_from(seen.step_s_p99, step_s_p50=seen.step_s_p50)

    def until_verdict(self) -> Hang:
        """Look until there is a verdict; return it."""
        found: list[Hang] = []

        def judged() -> bool:
            time.sleep(LOOK_S)
            verdict = self.look()
            found.extend([verdict] if verdict is not None else [])
            return bool(found)

        until(judged, "a verdict", limit_s=240.0)
        return found[0]

    def until_still(self, for_s: float) -> None:
        """Look until no rank has progressed for so long; there must be no verdict."""

        def still() -> bool:
            time.sleep(LOOK_S)
            assert (verdict := self.look()) is None, verdict
            watched = [self._detector.worker(worker) for worker in WORKERS]
            return all(one is not None and self._detector.still_s(one) > for_s for one in watched)

        until(still, f"no progress for {for_s} s", limit_s=240.0)

    def until_steps(self, num_steps: int) -> None:
        """Look until every rank has done ``num_steps`` more; there must be no verdict."""
        goals = [self._step(rank) + num_steps for rank in range(NUM_RANKS)]

        def done() -> bool:
            time.sleep(LOOK_S)
            assert (verdict := self.look()) is None, verdict
            return all(self._step(rank) >= goal for rank, goal in enumerate(goals))

        until(done, f"{num_steps} steps", limit_s=240.0)

    def _step(self, rank: int) -> int:
        view = read_progress(self._ranks.places[rank].progress_path)
        return 0 if view is None else view.step


def stop_and_find(ranks: Ranks, watch: Watch, rank: int) -> Hang:
    """Stop ``rank`` by a signal until there is a verdict; return that."""
    watch.until_steps(3)
    os.kill(ranks.pid(rank), signal.SIGSTOP)
    try:
        return watch.until_verdict()
    finally:
        os.kill(ranks.pid(rank), signal.SIGCONT)


def finish(ranks: Ranks, directory: Path) -> list[int]:
    """Ask the ranks to stop; return how many steps each has done."""
    (directory / "stop").touch()
    done: list[int] = ranks.results()
    return done
