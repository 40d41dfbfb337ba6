"""The ways in which a state may leave a device, switched in a training, and what each costs.

``pieces``, ``passes`` and ``yields`` are those of ``workers.snapshot.device.Leaving``; with
``ahead`` the host calls at most so many collectives before the device has come to the first.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from tests.benchmarks.common import percentile
from tests.benchmarks.steps import Job
from workers.collectives import forming
from workers.snapshot.device import Leaving
from workers.train import Session

SWITCHES: Final = ("pieces", "passes", "yields", "ahead")
#: Every combination; "snapshots" is how a run does it.
WAYS: Final = (
    "none",
    "snapshots",
    *("+".join(s) for num in (1, 2, 3, 4) for s in itertools.combinations(SWITCHES, num)),
)
AHEAD_MAX: Final = 16
SMALL_BYTES: Final = 64 << 10


def switch(session: Session, way: str) -> None:
    """Have later snapshots leave in ``way``."""
    words = way.split("+")
    writer, attempt = session._boundary._writer, forming._process.current
    assert writer is not None, "snapshots are asked for"
    assert attempt is not None, "a session trains in an attempt"
    writer.device_copy.leaving = Leaving(
        pieces="pieces" in words, passes="passes" in words, yields="yields" in words
    )
    attempt.ahead_max = AHEAD_MAX if "ahead" in words else 0


def counts(session: Session) -> dict[str, float]:
    """Return what copies off the device have done so far."""
    writer = session._boundary._writer
    assert writer is not None, "snapshots are asked for"
    return asdict(writer.device_copy.counts)


class SmallCopies:
    """Copies of some KiB to and from a device, beside the training, as that has them itself."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._there = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
        self._here = torch.zeros(SMALL_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._stream: Any = torch.cuda.Stream(device) if self._is_cuda else None
        self._events: list[tuple[str, Any, Any]] = []
        self._ms: dict[str, list[float]] = defaultdict(list)

    def send(self, way: str) -> None:
        """Copy once each way, while snapshots leave in ``way``."""
        for target, source in ((self._there, self._here), (self._here, self._there)):
            if not self._is_cuda:
                begun_s = time.perf_counter()
                target.copy_(source)
                self._ms[way].append(1e3 * (time.perf_counter() - begun_s))
                continue
            with torch.cuda.stream(self._stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(source, non_blocking=True)
                end.record()
            self._events.append((way, begin, end))

    def ms(self) -> dict[str, list[float]]:
        """Return how long each copy took on the device, by way; wait for all."""
        if self._is_cuda:
            self._stream.synchronize()
        for way, begin, end in self._events:
            self._ms[way].append(begin.elapsed_time(end))
        self._events = []
        return dict(self._ms)


def by_way(
    job: Job, seen: Mapping[str, Any], small_ms: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Return, for each way, what steps took and what copies did."""
    steps_s: dict[str, list[float]] = {way: [] for way in job.ways}
    done: dict[str, dict[str, float]] = {way: defaultdict(float) for way in job.ways}
    for way, first, last in job.blocks():
        steps_s[way] += [b - a for a, b in itertools.pairwise(seen["times_s"][first : last + 1])]
        for name, after in seen["counts"][last].items():
            done[way][name] += after - seen["counts"][first][name]
    found = {}
    for way in job.ways:
        each, num = done[way], len(steps_s[way])
        copying_s = each["copying_s"]
        found[way] = {
            "step_ms": 1e3 * percentile(steps_s[way], 0.5),
            "step_p99_ms": 1e3 * percentile(steps_s[way], 0.99),
            "small_ms": percentile(small_ms[way], 0.5),
            "small_p99_ms": percentile(small_ms[way], 0.99),
            "gb_per_s": each["num_bytes"] / copying_s / 1e9 if copying_s else 0.0,
            "pieces": each["num_pieces"] / num,
            "pauses": each["num_pauses"] / num,
            "yields": each["num_yields"] / num,
            "yielding_ms": 1e3 * each["yielding_s"] / num,
            "held_ms": 1e3 * each["held_s"] / num,
        }
    return found
