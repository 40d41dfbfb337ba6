"""``everstep.DataLoader``: how fast it finds a step, and batches beside torchdata's loader.

    python -m tests.benchmarks loader --rounds 9 --json

``seek`` is the time from asking for step 1,000,000 of a run with 512 samples a step until its first
batch is there, in the process itself: rows in memory, JSON lines whose index is cached, and packed
rows over those. A loader that reads with processes also waits for their start, at any step.

``throughput`` compares with torchdata's ``StatefulDataLoader`` over the same map-style dataset,
with as many processes, batches of 8 samples of 1,024 tokens and their targets. Both take samples
in a random order. ``cheap`` samples are sliced from memory, ``decoded`` ones are unpacked from
text, as those of a corpus are, and ``tiny`` ones are single numbers; our loader is told that they
draw no random numbers. It is not told of ``keyed`` ones, which are cheap ones otherwise, and
``noisy`` ones draw from NumPy and Python. The two take turns in every round; ratios are medians
over rounds of the ratio within a round. Without processes all work is this thread's, so its
processor time counts, and what else runs on the machine hardly does.

``stream`` is what a digest of a stream's samples costs: processor time for each micro-batch read,
beside the same with a digest that does nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep import DataLoader, JsonLines, pack
from tests.benchmarks.common import load_average, paired, spread
from workers.data import DataOrder
from workers.data.fingerprint import fingerprint

SEEK_STEP, SEEK_BATCH = 1_000_000, 512
TOKENS, BATCH = 1024, 8
LINES = 20_000


class Cheap:
    """Rows of tokens in memory, and what follows each."""

    draws = False

    def __init__(self) -> None:
        self._tokens = np.arange(4096 * (TOKENS + 1)).reshape(4096, -1) % 50_000

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        row = self._tokens[index % 4096]
        return torch.from_numpy(row[:-1].copy()), torch.from_numpy(row[1:].copy())


class Decoded(Cheap):
    """The same from JSON text."""

    def __init__(self) -> None:
        super().__init__()
        self._texts = [json.dumps(row.tolist()) for row in self._tokens[:64]]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.tensor(json.loads(self._texts[index % 64]))
        return row[:-1], row[1:]


class Keyed(Cheap):
    """The same, without a word that they draw no random numbers."""

    draws = True


class Tiny(Cheap):
    """Single numbers."""

    def __init__(self) -> None:
        self._numbers = torch.arange(4096.0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._numbers[index % 4096]


class Noisy(Tiny):
    """Single numbers with noise."""

    draws = True

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + random.random() + np.random.rand()  # noqa: NPY002


def seeks(dataset: Any, repeat: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds until the first batch of ``SEEK_STEP``, and of the processor."""
    loader = DataLoader(dataset)
    times_ms: list[float] = []
    used_ms: list[float] = []
    for number in range(repeat):
        order = DataOrder(seed=number, num_samples=len(loader), global_batch=SEEK_BATCH)
        begun_s, used_s = time.perf_counter(), time.process_time()
        batches = loader.batches(
            order, seed=0, micro_batch=BATCH, numbers=[0], first_step=SEEK_STEP
        )
        next(batches)
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
        used_ms.append(1e3 * (time.process_time() - used_s))
        batches.close()
    return {"wall": spread(times_ms), "processor": spread(used_ms)}


def write_lines(path: Path) -> None:
    """Write documents of 20 to 400 tokens."""
    with path.open("w") as file:
        for number in range(LINES):
            tokens = [(number * at) % 50_000 for at in range(20 + number * 7919 % 380)]
            file.write(f"{json.dumps({'input_ids': tokens})}\n")


def ours(dataset: Any, num_workers: int) -> Iterator[Any]:
    """Return our batches."""
    order = DataOrder(seed=1, num_samples=len(dataset), global_batch=BATCH)
    loader = DataLoader(dataset, num_workers=num_workers, draws=dataset.draws)
    return loader.batches(order, seed=0, micro_batch=BATCH, numbers=[0])


def theirs(dataset: Any, num_workers: int) -> Iterator[Any]:
    """Return torchdata's; it draws from fewer samples, so that their permutation is cheap."""
    sampler = RandomSampler(range(100_000))
    return iter(
        StatefulDataLoader(dataset, batch_size=BATCH, num_workers=num_workers, sampler=sampler)
    )


def rate(batches: Iterator[Any], num: int, clock: Callable[[], float]) -> float:
    """Return batches a second, once the first ones are there."""
    for _ in range(8):
        next(batches)
    begun_s = clock()
    for _ in range(num):
        next(batches)
    return num / (clock() - begun_s)


def throughput(dataset: Any, num_workers: int, *, rounds: int, num: int) -> dict[str, Any]:
    """Return batches a second of both, and their ratio."""
    ways: dict[str, Callable[[Any, int], Iterator[Any]]] = {"everstep": ours, "torchdata": theirs}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    clock = time.perf_counter if num_workers else time.thread_time
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            batches = ways[name](dataset, num_workers)
            rates[name].append(rate(batches, num, clock))
            del batches
    medians = {name: round(statistics.median(found)) for name, found in rates.items()}
    return {**medians, "ratio": paired(rates["everstep"], rates["torchdata"])}


class Rows(Iterable[Any]):
    """Cheap samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        cheap = Cheap()
        return ({"input_ids": x, "labels": y} for x, y in map(cheap.__getitem__, range(100_000)))


class Placed(Rows):
    """The same, which says where it is."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; it is never resumed here."""


def digests(dataset: Rows, *, rounds: int, num: int) -> dict[str, Any]:
    """Return microseconds per micro-batch of a step of 4, with and without the digest.

    The two take turns of 5 steps; ``digest`` is the difference within a turn.
    """
    order = DataOrder(seed=0, num_samples=1, global_batch=4 * BATCH)
    ways = {"with": fingerprint, "without": _nothing}
    all_batches = {
        name: DataLoader(dataset).batches(order, seed=0, micro_batch=BATCH, numbers=[0])
        for name in ways
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds * num // 5):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            with mock.patch("workers.data.stream.fingerprint", ways[name]):
                begun_s = time.thread_time()
                for _ in range(5):
                    next(all_batches[name])
                found[name].append(1e6 * (time.thread_time() - begun_s) / 20)
    found["digest"] = [one - other for one, other in zip(*found.values(), strict=True)]
    return {name: spread(times) for name, times in found.items()}


def _nothing(*_: object) -> int:
    return 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"load": load_average()}
    with tempfile.TemporaryDirectory() as directory:
        path, cache = Path(directory) / "documents.jsonl", f"{directory}/cache"
        write_lines(path)
        lines = JsonLines(path, cache=cache)
        datasets = {
            "memory": Cheap(),
            "json lines": _Beginnings(lines),
            "packed": pack(lines, TOKENS, cache=cache),
        }
        found["seek_ms"] = {
            name: seeks(dataset, 2 * given.rounds) for name, dataset in datasets.items()
        }
    found["throughput"] = {
        f"{type(dataset).__name__.lower()}, {num_workers} processes": throughput(
            dataset, num_workers, rounds=given.rounds, num=num
        )
        for dataset, all_workers, num in (
            (Cheap(), (0,), 10 * given.batches),
            (Keyed(), (0,), 10 * given.batches),
            (Cheap(), (1, 2), given.batches),
            (Decoded(), (0, 1, 2), given.batches),
            (Tiny(), (0,), 10 * given.batches),
            (Noisy(), (0,), 10 * given.batches),
        )
        for num_workers in all_workers
    }
    found["stream_us"] = {
        type(dataset).__name__.lower(): digests(dataset, rounds=given.rounds, num=given.batches)
        for dataset in (Rows(), Placed())
    }
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(name, json.dumps(value, indent=1))


class _Beginnings:
    """The first tokens of documents of different lengths, so that they make a batch."""

    def __init__(self, dataset: JsonLines) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self._dataset[index]["input_ids"][:20])


if __name__ == "__main__":
    main()
