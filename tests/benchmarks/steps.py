"""A small training whose steps are measured, block by block, for the benchmarks of saving."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor

from tests.benchmarks.common import processor_s
from ucp_core.layout import ParallelLayout
from workers.models import PRESETS, ModelShape

SEQUENCE_LENGTH: Final = 128


def _shape(dim: int, num_layers: int, ffn_dim: int) -> ModelShape:
    return ModelShape(
        vocab_size=264, dim=dim, num_layers=num_layers, num_heads=dim // 64,
        num_kv_heads=dim // 64, ffn_dim=ffn_dim, tied=True,
    )  # fmt: skip


#: By megabytes of state per worker, if there are four.
SHAPES: Final = {
    3: PRESETS["small"],
    50: _shape(512, 5, 1408),
    200: _shape(768, 9, 2112),
    300: _shape(1024, 8, 2816),
}


def shape_of(megabytes: int, num_workers: int) -> ModelShape:
    """Return a decoder of which each worker has about so much state."""
    shape = SHAPES[megabytes]
    if megabytes == min(SHAPES):
        return shape
    return replace(shape, num_layers=max(1, round(shape.num_layers * num_workers / 4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training, and the blocks of its state."""

    shape: ModelShape  #: Shape of the decoder.
    workers: int  #: How many.
    global_batch: int  #: Samples per step.
    rounds: int  #: Each has a block of every way.
    block: int  #: Steps in a block.
    ways: tuple[str, ...]  #: To save; the first is none.
    micro_batch: int = 2  #: Samples in a pass.
    sequence_length: int = SEQUENCE_LENGTH  #: Tokens in a sample.
    #: Precision of the passes, as in ``TrainSettings``.
    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: bool = False  #: Whether every block is compiled.
    probes: bool = False  #: Whether small copies are timed meanwhile, and counts are kept.
    layout: ParallelLayout | None = None  #: Layout of the workers; None to shard over them.

    @classmethod
    def of_size(
        cls, megabytes: int, *, workers: int, ways: tuple[str, ...], lingers: bool, **more: int
    ) -> Self:
        """Return a job whose workers have about ``megabytes`` of state each.

        Args:
            megabytes: Decide whatever of ``more`` is 0.
            workers: How many.
            ways: To save; the first is none.
            lingers: Whether a way saves every tenth step only, so that its blocks are longer.
                Shorter blocks are more precise: the machine's speed drifts within seconds.
            more: ``global_batch``, ``rounds``, ``block``.
        """
        is_small = megabytes < 50
        if lingers:
            rounds, block = (12 if is_small else 3), 20
        else:
            rounds, block = (100, 5) if is_small else (6, 4)
        return cls(
            shape=shape_of(megabytes, workers),
            workers=workers,
            global_batch=more["global_batch"] or (16 if is_small else 8),
            rounds=more["rounds"] or rounds,
            block=more["block"] or block,
            ways=ways,
        )

    @property
    def num_steps(self) -> int:
        """Return the steps of all: one block to warm up, all rounds, and one that is last."""
        return self.block * (1 + self.rounds * len(self.ways)) + 1

    def way(self, step: int) -> str:
        """Return how to save after ``step``, counted from 1."""
        number = min((step - 1) // self.block - 1, self.rounds * len(self.ways) - 1)
        if number < 0:
            return self.ways[-1]
        turn, place = divmod(number, len(self.ways))
        # There and back, so that what drifts falls on all.
        return (self.ways if turn % 2 == 0 else self.ways[::-1])[place]

    def blocks(self) -> Iterator[tuple[str, int, int]]:
        """Yield way, and the ticks of a ``Meter`` at begin and end of what is kept of a block."""
        for number in range(1, 1 + self.rounds * len(self.ways)):
            first = number * self.block
            yield self.way(first + 1), first + self._num_left_out, first + self.block

    def is_kept(self, step: int, way: str) -> bool:
        """Return whether a step is one of those measured under ``way``."""
        return self.way(step) == way and any(a < step <= b for _, a, b in self.blocks())

    @property
    def _num_left_out(self) -> int:
        return max(1, self.block // 5)


class Meter:
    """Notes times at the begin of every step."""

    def __init__(self, job: Job, pids: Sequence[int]) -> None:
        self._pids = pids
        self._times_s: list[float] = []
        self._used_s: list[float] = []
        self._others_s: list[float] = []
        self._beside_s: list[float] = []
        self._counts: list[Mapping[str, float]] = []
        self._num_steps = job.num_steps
        #: Further observations.
        self.more: dict[str, Any] = {}

    def tick(self, counts: Mapping[str, float] | None = None) -> None:
        """Note that a step begins, with what was counted so far."""
        self._counts.append(counts or {})
        self._times_s.append(time.perf_counter())
        others_s = sum(map(processor_s, self._pids))
        self._used_s.append(time.process_time() + others_s)
        self._others_s.append(others_s)
        self._beside_s.append(thread_s("snapshot"))

    def seen(self) -> dict[str, Any]:
        """Return seconds since whenever, and processor seconds so far, by step.

        ``others_s`` are those of the other processes alone, ``beside_s`` those of the thread that
        completes snapshots.
        """
        assert len(self._times_s) == self._num_steps, "a step was missed"
        return {
            "times_s": self._times_s,
            "used_s": self._used_s,
            "others_s": self._others_s,
            "beside_s": self._beside_s,
            "counts": self._counts,
            **self.more,
        }


def thread_s(name: str) -> float:
    """Return the processor seconds of this process's thread of that name; 0 if there is none."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == name]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in idents if one)


def batch(
    samples: Sequence[int], vocab_size: int, sequence_length: int = SEQUENCE_LENGTH
) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows each, ``(samples, sequence)``, drawn by sample."""
    rows = []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        rows.append(torch.randint(vocab_size, (sequence_length + 1,), generator=generator))
    tokens = torch.stack(rows)
    return tokens[:, :-1], tokens[:, 1:]
