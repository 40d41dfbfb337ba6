"""A change of layout from memory, beside the time of the bytes that must move.

    python -m tests.benchmarks relayout [--layers 6] [--rounds 9]

Two processes hold the keepers' memory of two nodes, each with the snapshots of its half of the
ranks of one layout: weights and Adam moments of a decoder, 1 GB in all. The ranks of another
layout, half of them on either node, load their parts as workers do when an attempt begins: they ask
the keepers, open all parts, verify every byte that they take and put it in place. No node has
copies of the other's snapshots, so that bytes come over TCP, too.

``limit`` is the time of as many bytes: those from the own node with one memcpy (numpy's) from the
same memory, already mapped, and then those of the other node over one TCP connection, sendall there
and recv_into here. ``checked`` is the same and, after that, one crc32 over what was moved. Each is
the time until the slowest rank is done, and they take turns. ``over_limit`` and ``over_checked``
are medians over rounds of the ratio within a round; the first is to be at most 1.5.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from tests.benchmarks.bench_snapshot import RUN_S_MAX
from tests.benchmarks.bench_snapshot_load import receive, save_part, streams
from tests.benchmarks.common import load_average, paired
from tests.support.fake_ranks import state_of
from tests.support.node_memory import NodeProcess, newest
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.numerics import crc32
from workers.keeper import MemorySources
from workers.memory import descriptor_socket, open_arena
from workers.models import Decoder, ModelShape, resolve, tensor_plan
from workers.parallel import ModelPlan
from workers.process import tuned
from workers.protocol import LOCAL_MEMORY, PartRef
from workers.settings import CheckpointSettings, Settings, SnapshotSettings
from workers.state import HostBuffer, StateEntry
from workers.train.loading.restore import Target

RATIO_MAX: Final = 1.5
PLAN: Final = ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage)
WAYS: Final = ("ours", "limit", "checked")
NODES: Final = ("node-a", "node-b")
PAIRS: Final = (
    (ParallelLayout(dp_shard=4), ParallelLayout(dp_shard=2, tp=2)),
    (ParallelLayout(pp=2, tp=2), ParallelLayout(dp_shard=3)),
    (ParallelLayout(pp=2, dp_shard=2), ParallelLayout(tp=2)),
    (ParallelLayout(dp_shard=2, tp=2), ParallelLayout(dp_shard=2)),
)


def shape_of(num_layers: int) -> ModelShape:
    """Return a decoder of which each layer has 164 MB of state."""
    sizes = {"dim": 1024, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 3072, "tied": False}
    return resolve("small", {**sizes, "num_layers": num_layers})


def value_of(entry: StateEntry) -> torch.Tensor:
    """Return what an entry has: each element of a tensor has another number."""
    first = sum(map(ord, entry.fqn + entry.slot))
    whole = (torch.arange(np.prod(entry.shape, dtype=int)) + first).float().view(entry.shape)
    ends = zip(entry.box.start, entry.box.stop, strict=True)
    return whole[tuple(slice(*end) for end in ends)]


def node_of(rank: int, world_size: int) -> int:
    """Return which node a rank is on."""
    return int(2 * rank >= world_size)


def fill_memory(doors: Sequence[Path], shape: ModelShape, layout: ParallelLayout) -> None:
    """Write the versions of all ranks into arenas of their keepers, and let go of them."""
    world_size = layout.world_size
    for rank in range(world_size):
        state = state_of(lambda: Decoder(shape), PLAN, layout, rank, attempt=rank + 1)
        for entry in state.entries():
            entry.tensor.detach().copy_(value_of(entry))
        tensors = HostBuffer().capture(state.saved())
        door = descriptor_socket(doors[node_of(rank, world_size)])
        source = {"writer": "everstep", "layout": layout.to_json()}
        save_part(door, tensors, rank, source, world_size)
    dist.destroy_process_group()


class Loader:
    """One rank of the new layout."""

    def __init__(
        self,
        place: Place,
        shape: ModelShape,
        layout: ParallelLayout,
        places: Sequence[PartRef],
        stream_port: int,
    ) -> None:
        number = node_of(place.rank, layout.world_size)
        self.node, self.door = NODES[number], place.directory / NODES[number]
        self.places = places
        self.entries = state_of(
            lambda: Decoder(shape), PLAN, layout, place.rank, attempt=1
        ).entries()
        self.num_bytes = sum(entry.tensor.nbytes for entry in self.entries)
        self.num_near = 0
        self.threads = CheckpointSettings().threads
        self.target = np.zeros(self.num_bytes, np.uint8)
        self.arenas = []
        for each in places:
            if each.node == self.node:
                arena = open_arena(descriptor_socket(self.door), each.arena)
                arena.populate()
                self.arenas.append((arena, each))
        self.connection = socket.create_connection(("127.0.0.1", stream_port))

    def ours(self) -> None:
        """Load as a worker does when an attempt begins."""
        target = Target(self.entries, HostBuffer(), self.threads, lambda _: None)
        sources = MemorySources(self.places, node=self.node, keeper_directory=self.door)
        with closing(sources):
            sources.load(target.fill_from)
        assert not sources.skipped, sources.skipped
        taken = sources.taken_bytes
        # A verified block may begin before the needed bytes, and end behind them.
        self.num_near = self.num_bytes * taken[LOCAL_MEMORY] // taken.total()

    def limit(self) -> None:
        """Move as many bytes."""
        left = self.target[: self.num_near]
        while left.size:
            for arena, place in self.arenas:
                body = np.frombuffer(arena.body(place.held.buffer), np.uint8)
                size = min(place.held.data_bytes, left.size)
                np.copyto(left[:size], body[:size])
                left = left[size:]
        receive(self.connection, self.target[self.num_near :].data)

    def checked(self) -> None:
        """Move them, and read them once more."""
        self.limit()
        crc32(self.target.data)

    def check(self) -> None:
        """Stop if what was loaded is not what was written; forget it."""
        for entry in self.entries:
            assert torch.equal(entry.tensor, value_of(entry)), entry.fqn
            entry.tensor.detach().fill_(torch.nan)


def meet(store: dist.TCPStore, name: str, num_ranks: int) -> None:
    """Return when all ranks are here."""
    if store.add(name, 1) == num_ranks:
        store.set(f"{name} all", "")
    store.wait([f"{name} all"])


def load_rank(
    place: Place,
    *,
    shape: ModelShape,
    layout: ParallelLayout,
    rounds: int,
    places: Sequence[PartRef],
    stream_port: int,
) -> dict[str, Any]:
    """Be one rank that loads; return begin and end by way and round."""
    loader = Loader(place, shape, layout, places, stream_port)
    store = dist.TCPStore("127.0.0.1", place.port)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        # The first round pays for imports and what is touched first, and is checked.
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            way: Callable[[], None] = getattr(loader, name)
            meet(store, f"{number} {name}", layout.world_size)
            begun_s = time.perf_counter()
            way()
            if number:
                taken[name].append((begun_s, time.perf_counter()))
            elif name == "ours":
                loader.check()
    dist.destroy_process_group()
    return {"bytes": loader.num_bytes, "near": loader.num_near, "taken": taken}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return times and their ratio."""
    wall_s = {
        name: [
            max(end for _, end in each) - min(begin for begin, _ in each)
            for each in zip(*(rank["taken"][name] for rank in results), strict=True)
        ]
        for name in WAYS
    }
    num_bytes = sum(rank["bytes"] for rank in results)
    over_limit = paired(wall_s["ours"], wall_s["limit"])
    return {
        "gb": round(num_bytes / 1e9, 2),
        "from_other_node": round(1 - sum(rank["near"] for rank in results) / num_bytes, 2),
        **{f"{name}_s": round(statistics.median(times), 3) for name, times in wall_s.items()},
        "over_limit": over_limit,
        "over_checked": paired(wall_s["ours"], wall_s["checked"]),
        "reached": over_limit["median"] <= RATIO_MAX,
    }


def measure(
    saved: ParallelLayout, loaded: ParallelLayout, *, num_layers: int, rounds: int, folder: Path
) -> dict[str, Any]:
    """Return what there is to say of one pair."""
    shape = shape_of(num_layers)
    chosen = Settings(snapshot=SnapshotSettings(node_memory_mib=12 << 10))
    with ExitStack() as stack:
        nodes = [NodeProcess(name, folder / name, folder / "run", chosen) for name in NODES]
        for node in nodes:
            stack.callback(node.kill)
        fill_memory([node.directory for node in nodes], shape, saved)
        _, places = newest(nodes)
        port = stack.enter_context(streams(200_000_000 * num_layers))
        function = functools.partial(
            load_rank,
            shape=shape,
            layout=loaded,
            rounds=rounds,
            places=places,
            stream_port=port,
        )
        ranks = stack.enter_context(running(function, loaded.world_size, folder))
        return summary(ranks.results(RUN_S_MAX))


def main() -> None:
    """Print one JSON object a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(tuned(os.environ))
    for saved, loaded in PAIRS:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(
                saved,
                loaded,
                num_layers=options.layers,
                rounds=options.rounds,
                folder=Path(folder),
            )
        pair = f"{saved} -> {loaded}"
        print(json.dumps({"pair": pair, **found, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
