"""What a log of gradients between rarer snapshots would cost and save, where replicas are equal.

    python -m tests.benchmarks recomputation [--megabytes 50] [--replicas 2] [--rounds 3]

This is the optimizer recomputation of REFT (arXiv 2310.12670), which everstep does without
(``orchestrator.policies.saving.redundancy`` says why). With plain data parallelism every rank has
the reduced gradients of a step: for AdamW, a third of the bytes of its state. A rank could save its
share of them after most steps and its share of the state after every K-th; a recovery then repeats
up to K - 1 updates.

``every`` saves the state after each step, as everstep does; ``second`` and ``third`` after every
second and third step; ``log K`` is recomputation. A rank copies and checksums what it saves, for
itself and for one other rank, with the code that takes snapshots. Blocks of steps with a real AdamW
take turns. Medians over blocks:

- ``stall_ms``: what training waits for, mean of a block's steps; ``stall_max_ms``: the worst step;
- ``processor_ms``: processor time of a step for it, keeper included;
- ``copied_mib``: copied per step, on average;
- ``memory_mib``: three slots of state, and the gradients since the older of two bases;
- ``update_ms``: an update of the whole state on one thread, as a keeper would make it.

``recovery``, of two replicas from the own node's memory: the time to load the state, and, per step
of the log, the time for the gradients and the update. ``is_exact`` says whether the result has the
same bits. ``inexact`` counts the elements of weights and optimizer state that differ after ten
updates of thirds of tensors from updates of whole tensors, as with another number of shards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.benchmarks.common import load_average, processor_s
from tests.support.node_memory import NodeProcess, newest
from tests.support.snapshots import eventually
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from ucp_core.native import load
from workers.keeper import MemorySources
from workers.memory import NUM_BUFFERS
from workers.protocol import Assignment, KeeperOrder
from workers.settings import Settings, SnapshotSettings
from workers.snapshot import Captured, SnapshotMemory, SnapshotWriter
from workers.state import StateEntry
from workers.state.replica_shares import cut

#: Steps between two states, and whether gradients are saved between them.
WAYS: Final = {
    "every": (1, False),
    "second": (2, False),
    "third": (3, False),
    "log 2": (2, True),
    "log 4": (4, True),
    "log 8": (8, True),
}
#: As many of all of them.
BLOCK: Final = 24
NUM_TENSORS: Final = 24
#: A weight and its two moments.
SLOTS: Final = ("weight", "exp_avg", "exp_avg_sq")
ADAMW: Final = partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": ADAMW,
    "AdamW fused": partial(ADAMW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "SGD fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "Muon": partial(torch.optim.Muon, lr=1e-2),
}


class Training:
    """Parameters that AdamW updates by random gradients, with state for so many megabytes."""

    def __init__(self, megabytes: int) -> None:
        shape = (256, (megabytes << 20) // (4 * len(SLOTS) * NUM_TENSORS * 256))
        self.parameters = [torch.nn.Parameter(torch.randn(shape)) for _ in range(NUM_TENSORS)]
        self.optimizer = ADAMW(self.parameters)
        self._gradients = [torch.randn(shape) for _ in self.parameters]
        self.ready()
        self.optimizer.step()

    def ready(self) -> None:
        """Have other gradients than before, as after a reduction and clipping."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient.mul_(-0.9)

    def state(self) -> list[StateEntry]:
        """Return weights and moments."""
        return [
            _entry(number, slot, parameter.detach() if slot == SLOTS[0] else held[slot])
            for number, parameter in enumerate(self.parameters)
            for held in [self.optimizer.state[parameter]]
            for slot in SLOTS
        ]

    def gradients(self) -> list[StateEntry]:
        """Return what the next update takes."""
        return [_entry(number, "gradient", each) for number, each in enumerate(self._gradients)]


def _entry(number: int, slot: str, tensor: Tensor) -> StateEntry:
    shape = tuple(tensor.shape)
    box = Box.full(shape)
    return StateEntry(fqn=f"p{number}", slot=slot, shape=shape, box=box, tensor=tensor)


class Saving:
    """One rank's saving of some tensors, for itself and for the rank before it.

    Args:
        node: Whose memory takes it.
        name: Of the worker there.
        entries: What all replicas have alike.
        replicas: How many they are.
    """

    def __init__(
        self, node: NodeProcess, name: str, entries: list[StateEntry], replicas: int
    ) -> None:
        parts = [(entry.box, entry.tensor.element_size()) for entry in entries]
        shares = [
            [entries[number].rows(box) for number, box in share] for share in cut(parts, replicas)
        ]
        self._own, self._guarded = shares[0], ((replicas - 1, shares[-1]),)
        saved = [*self._own, *shares[-1]]
        self.size_bytes = sum(entry.tensor.nbytes for entry in saved)
        assignment = Assignment(
            attempt=1,
            rank=0,
            layout=ParallelLayout(dp_replicate=replicas),
            store_host="",
            store_port=0,
            resume_step=0,
            resume_attempt=0,
            lineage=((1, 0),),
            guards=(replicas - 1,),
        )
        memory = SnapshotMemory(node.directory, name)
        self.writer = SnapshotWriter(memory, assignment, fenced=lambda: False, told=lambda: None)
        self.writer.prepare(self._captured(0))
        assert eventually(lambda: self.writer.is_ready)

    def take(self, step: int) -> float:
        """Save all of it; return the seconds that the training thread waited."""
        begun_s = time.perf_counter()
        assert self.writer.capture(self._captured(step))
        stalled_s = time.perf_counter() - begun_s
        self.writer.complete(pin=False)
        assert self.writer.wait(step)
        return stalled_s

    def _captured(self, step: int) -> Captured:
        return Captured(
            step=step, entries=self._own, extra={}, param_groups=[], guarded=self._guarded
        )


class Bench:
    """A training, and a node that takes its states and another that takes its gradients."""

    def __init__(self, megabytes: int, replicas: int, folder: Path, stack: ExitStack) -> None:
        self.training = Training(megabytes)
        self._step = 0
        settings = Settings(snapshot=SnapshotSettings(node_memory_mib=64 + 8 * megabytes))
        self._nodes: list[NodeProcess] = []
        savings = []
        for name, entries in [
            ("state", self.training.state()),
            ("gradients", self.training.gradients()),
        ]:
            node = NodeProcess(name, folder / name, folder / "run", settings)
            stack.callback(node.kill)
            node.order(KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=()))
            self._nodes.append(node)
            savings.append(Saving(node, f"w-{name}", entries, replicas))
            stack.callback(savings[-1].writer.close)
        self.state, self.gradients = savings

    def block(self, every: int, *, is_logged: bool) -> dict[str, float]:
        """Train for a block; return what saving cost."""
        stalls_s, used_s, updates_s = [], 0.0, []
        for place in range(BLOCK):
            self._step += 1
            self.training.ready()
            is_state = (place + 1) % every == 0
            before_s, stalled_s = self._used_s(), 0.0
            if is_logged and not is_state:
                stalled_s = self.gradients.take(self._step)
            used_s += self._used_s() - before_s
            begun_s = time.perf_counter()
            self.training.optimizer.step()
            updates_s.append(time.perf_counter() - begun_s)
            before_s = self._used_s()
            if is_state:
                stalled_s = self.state.take(self._step)
            used_s += self._used_s() - before_s
            stalls_s.append(stalled_s)
        return {
            "stall_ms": 1e3 * statistics.mean(stalls_s),
            "stall_max_ms": 1e3 * max(stalls_s),
            "processor_ms": 1e3 * used_s / BLOCK,
            "update_ms": 1e3 * statistics.median(updates_s),
        }

    def recovery(self, rounds: int) -> dict[str, Any]:
        """Lose a step; return how long the state before it takes, its gradients, and the update."""
        training = self.training
        self.state.take(self._step + 1)
        training.ready()
        self.gradients.take(self._step + 2)
        training.optimizer.step()
        was = [entry.tensor.clone() for entry in training.state()]
        took_ms: dict[str, list[float]] = {"state": [], "gradients": [], "update": []}
        is_exact = True
        for _ in range(rounds):
            for node, entries, what in zip(
                self._nodes, (training.state(), training.gradients()), took_ms, strict=False
            ):
                begun_s = time.perf_counter()
                _load(node, entries)
                took_ms[what].append(1e3 * (time.perf_counter() - begun_s))
            for held in training.optimizer.state.values():
                held["step"] -= 1
            begun_s = time.perf_counter()
            training.optimizer.step()
            took_ms["update"].append(1e3 * (time.perf_counter() - begun_s))
            now = [entry.tensor for entry in training.state()]
            is_exact = is_exact and not _num_different(was, now)
        found = {
            f"{what}_ms": round(statistics.median(all_ms), 2) for what, all_ms in took_ms.items()
        }
        return {**found, "is_exact": is_exact}

    def _used_s(self) -> float:
        return time.process_time() + sum(processor_s(node.pid) for node in self._nodes)


def _load(node: NodeProcess, entries: Sequence[StateEntry]) -> None:
    """Put the newest of what a node's memory has into the tensors, verified."""
    need = [entry.local_tensor(entry.tensor) for entry in entries]
    sources = MemorySources(newest([node])[1], node=node.node, keeper_directory=node.directory)
    with closing(sources):
        sources.load(lambda version: load(version, need))


def inexact(name: str) -> str:
    """Return how many elements differ, of how many, if an optimizer is given thirds of tensors."""
    shapes = [(257, 129), (1024, 96)] + [(1003,), (17,)] * (name != "Muon")
    weights = [torch.randn(shape) for shape in shapes]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(10)]
    whole = _updated(OPTIMIZERS[name], weights, gradients)
    different = 0
    for place in range(3):
        mine = [_third(weight, place) for weight in weights]
        theirs = [[_third(each, place) for each in step] for step in gradients]
        parts = _updated(OPTIMIZERS[name], mine, theirs)
        different += _num_different([_third(each, place) for each in whole], parts)
    return f"{different} of {sum(each.numel() for each in whole)}"


def _third(tensor: Tensor, place: int) -> Tensor:
    return tensor.tensor_split(3)[place].clone()


def _updated(
    make: Callable[..., torch.optim.Optimizer],
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Return weights, and what the optimizer keeps of their shape, after these gradients."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    kept = [
        value
        for parameter in parameters
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor) and value.dim()
    ]
    return [*(parameter.detach() for parameter in parameters), *kept]


def _num_different(some: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    return sum(
        int((one.view(torch.int32) != other.view(torch.int32)).sum())
        for one, other in zip(some, others, strict=True)
    )


def measure(megabytes: int, replicas: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return what saving costs in each way, and what recovery does."""
    with ExitStack() as stack:
        bench = Bench(megabytes, replicas, folder, stack)
        blocks: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        # The first block of each makes the memory of the keeper resident.
        for number in range(rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                every, is_logged = WAYS[way]
                blocks[way].append(bench.block(every, is_logged=is_logged))
        updates = [one["update_ms"] for all_of in blocks.values() for one in all_of[1:]]
        found: dict[str, Any] = {
            "megabytes": megabytes,
            "replicas": replicas,
            "update_ms": round(statistics.median(updates), 2),
        }
        state, gradients = bench.state.size_bytes / 2**20, bench.gradients.size_bytes / 2**20
        for way, (every, is_logged) in WAYS.items():
            logged = gradients if is_logged else 0.0
            middle = {
                name: round(statistics.median(one[name] for one in blocks[way][1:]), 2)
                for name in ("stall_ms", "stall_max_ms", "processor_ms")
            }
            copied = (state + (every - 1) * logged) / every
            memory = NUM_BUFFERS * state + every * logged
            found[way] = {**middle, "copied_mib": round(copied, 1), "memory_mib": round(memory, 1)}
        if replicas == 2:
            found["recovery"] = bench.recovery(rounds)
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.megabytes, options.replicas, options.rounds, Path(folder))
    found["inexact"] = {name: inexact(name) for name in OPTIMIZERS}
    print(json.dumps({**found, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
