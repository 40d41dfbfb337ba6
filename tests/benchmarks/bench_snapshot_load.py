"""Snapshots of four ranks loaded by three, beside copies, streams and DCP.

    python -m tests.benchmarks snapshot_load [--megabytes 3 50 300] [--rounds 9] [--plain]

One process holds a keeper's memory with the snapshots of four FSDP workers: a decoder's weights and
Adam moments. Each of three ranks loads its third as a worker does after a fault: it asks the
keeper, opens all four parts, verifies every byte that it takes and puts it in place. All ways fill
the same tensors, which were written before.

- ``local``: from the memory of the own node's keeper; ``mapped`` without mapping it first.
- ``copy``: one memcpy (numpy's) of as many bytes from the same memory, already mapped.
- ``tensors``: the same with a memcpy per tensor; see ``bench_snapshot``.
- ``dcp``: ``dcp.load`` of the same state from the page cache, which verifies nothing.
- ``peer``: over loopback from the keeper's server, as a worker of another node loads.
- ``stream``: as many bytes over one TCP connection, sendall there and recv_into here.

``together`` is all ranks at once, with two threads each as in a run (a copy and a stream have one),
and lasts as long as the slowest. ``alone`` is one rank while the others wait, ``one_thread`` the
same with one thread. The ways take turns; ratios are medians over rounds of the ratio within a
round, of wall time and of the processor time of the loading processes. A round repeats small
states. For ``--plain`` see ``bench_snapshot``.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.benchmarks.bench_snapshot import EXTRA, RUN_S_MAX, keeper
from tests.benchmarks.common import load_average, paired
from tests.benchmarks.decoder_parts import NUM_WORKERS, DecoderPart, assignment
from tests.support.filling import FilledStore
from tests.support.node_memory import NodeProcess, newest
from tests.support.ranks import Place, running
from ucp_core.native import Checkpoint, LocalTensor, RankSaver, load
from workers.keeper import MemorySources
from workers.memory import (
    LocalPart,
    descriptor_socket,
    open_arena,
    open_version,
    reserve,
)
from workers.process import tuned
from workers.protocol import PartRef
from workers.snapshot import source_of
from workers.snapshot.writing import BLOCK_BYTES

NUM_LOADERS: Final = 3
#: Issue of this part: at least so much of the other's speed.
TARGETS: Final = {("local", "copy"): 0.50, ("peer", "stream"): 0.60}
RATIOS: Final = (
    *TARGETS,
    ("local", "tensors"),
    ("mapped", "copy"),
    ("local", "dcp"),
    ("peer", "dcp"),
)
#: Readers of a rank.
MODES: Final = {"together": 2, "alone": 2, "one_thread": 1}
ROUND_BYTES: Final = 40_000_000
RECORD_BYTES_MAX: Final = 1 << 20
_SIZE: Final = struct.Struct("<Q")


def fill_memory(door: Path, megabytes: int) -> None:
    """Write the versions of all workers into arenas of the keeper, and let go of them."""
    for rank in range(NUM_WORKERS):
        part = DecoderPart(megabytes, rank, NUM_WORKERS)
        tensors = [entry.local_tensor(entry.tensor) for entry in part.entries]
        save_part(door, tensors, rank, source_of(assignment(rank, NUM_WORKERS)), NUM_WORKERS)


def save_part(
    door: Path,
    tensors: Sequence[LocalTensor],
    rank: int,
    source: Mapping[str, object],
    world_size: int,
) -> None:
    """Write a rank's part of a version into an arena of the keeper, and let go of it."""
    body_bytes = sum(len(each.data) for each in tensors) + RECORD_BYTES_MAX
    arena = reserve(door, f"w{rank:04d}.1", body_bytes=body_bytes, attempt=1)
    buffer = arena.choose(())
    arena.begin(buffer, attempt=1, step=1, rank=rank, world_size=world_size)
    saver = RankSaver(
        tensors,
        attempt=1,
        rank=rank,
        world_size=world_size,
        source=source,
        block_bytes=BLOCK_BYTES,
    )
    saver.save(
        FilledStore(arena, buffer),
        "",
        step=1,
        data=[tensors[index].data for index in saver.order],
        extra=EXTRA,
        param_groups=[],
        fsync=False,
    )
    arena.close()


def dtensors(part: DecoderPart, world_size: int) -> dict[str, Any]:
    """Return the part as torch sees it; every rank calls it."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for entry in part.entries:
        stride = (entry.shape[1], 1) if len(entry.shape) > 1 else (1,)
        found[f"{entry.slot}.{entry.fqn}"] = DTensor.from_local(
            entry.tensor,
            mesh,
            [Shard(0)],
            shape=torch.Size(entry.shape),
            stride=stride,
            run_check=False,
        )
    return found


def begin(place: Place, world_size: int) -> None:
    """Join the other ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=world_size)


def save_dcp(place: Place, *, megabytes: int) -> None:
    """Be one of the ranks that save by torch."""
    begin(place, NUM_WORKERS)
    part = DecoderPart(megabytes, place.rank, NUM_WORKERS)
    dcp.save(dtensors(part, NUM_WORKERS), checkpoint_id=str(place.directory / "dcp"))
    dist.destroy_process_group()


class Loader:
    """One rank that loads, and its ways to."""

    def __init__(
        self, place: Place, megabytes: int, places: Sequence[PartRef], stream_port: int
    ) -> None:
        self.directory = place.directory
        self.is_alone = False
        self.places = places
        self.part = DecoderPart(megabytes, place.rank, NUM_LOADERS)
        self.num_bytes = self.part.block.nbytes
        self.expected = self.part.block.copy()
        self.needed = [entry.local_tensor(entry.tensor) for entry in self.part.entries]
        self.dtensors = dtensors(self.part, NUM_LOADERS)
        self.arenas = [
            open_arena(descriptor_socket(place.directory), each.arena) for each in places
        ]
        for arena in self.arenas:
            arena.populate()
        self.connection = socket.create_connection(("127.0.0.1", stream_port))

    def copy(self, _threads: int) -> None:
        """Copy as many bytes as are needed, from the front of the parts."""
        target = self.part.block
        for arena, place in zip(self.arenas, self.places, strict=True):
            body = np.frombuffer(arena.body(place.held.buffer), np.uint8)
            size = min(place.held.data_bytes, target.nbytes)
            np.copyto(target[:size], body[:size])
            target = target[size:]

    def tensors(self, _threads: int) -> None:
        """Copy as many bytes to each tensor, from the parts one after the other."""
        bodies = iter(zip(self.arenas, self.places, strict=True))
        left = memoryview(b"")
        for tensor in self.needed:
            target = np.frombuffer(tensor.data, np.uint8)
            while target.size:
                if not left:
                    arena, place = next(bodies)
                    left = arena.body(place.held.buffer)[: place.held.data_bytes]
                size = min(target.size, len(left))
                np.copyto(target[:size], np.frombuffer(left[:size], np.uint8))
                target, left = target[size:], left[size:]

    def local(self, threads: int) -> None:
        """Load as a worker of the keeper's node."""
        self._load(
            MemorySources(self.places, node="node", keeper_directory=self.directory), threads
        )

    def peer(self, threads: int) -> None:
        """Load as a worker of another node."""
        self._load(MemorySources(self.places, node="other", keeper_directory=None), threads)

    def mapped(self, threads: int) -> None:
        """Load from memory that is mapped already."""
        pairs = zip(self.arenas, self.places, strict=True)
        self._fill(
            open_version({place.held.rank: LocalPart(arena, place.held) for arena, place in pairs}),
            threads,
        )

    def dcp(self, threads: int) -> None:
        """Load by torch."""
        del threads
        dcp.load(self.dtensors, checkpoint_id=str(self.directory / "dcp"), no_dist=self.is_alone)

    def stream(self, _threads: int) -> None:
        """Receive as many bytes."""
        receive(self.connection, self.part.block.data)

    def check(self) -> None:
        """Stop if what was loaded is not what was written; forget it."""
        assert np.array_equal(self.part.block, self.expected)
        self.part.block[:] = 1

    def _load(self, sources: MemorySources, threads: int) -> None:
        with closing(sources):
            sources.load(lambda checkpoint: self._fill(checkpoint, threads))
        assert not sources.skipped, sources.skipped

    def _fill(self, checkpoint: Checkpoint, threads: int) -> None:
        load(checkpoint, self.needed, threads=threads)


def load_rank(
    place: Place, *, megabytes: int, rounds: int, places: Sequence[PartRef], stream_port: int
) -> dict[str, Any]:
    """Be one rank that loads; return begin, end and processor seconds by mode, way and round."""
    begin(place, NUM_LOADERS)
    loader = Loader(place, megabytes, places, stream_port)
    repeats = max(1, ROUND_BYTES // loader.num_bytes)
    ways: list[tuple[str, str, int]] = [
        (mode, way, threads)
        for mode, threads in MODES.items()
        for way in ("copy", "tensors", "local", "mapped", "dcp", "stream", "peer")
    ]
    taken: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(rounds + 1):
        for mode, name, threads in ways if number % 2 else reversed(ways):
            dist.barrier()
            loader.is_alone = mode != "together"
            if loader.is_alone and place.rank:
                continue
            way: Callable[[int], None] = getattr(loader, name)
            used_s, begun_s = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                way(threads)
            ended_s = time.perf_counter()
            # The first round pays for imports and what is touched first, and is checked.
            if number:
                times = begun_s, ended_s, time.process_time() - used_s
                taken.setdefault(f"{mode}/{name}", []).append(times)
            elif name not in {"copy", "tensors", "stream"}:
                loader.check()
    dist.barrier()
    dist.destroy_process_group()
    return {"bytes": loader.num_bytes * repeats, "repeats": repeats, "taken": taken}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return times and ratios by mode."""
    found: dict[str, Any] = {}
    for mode in MODES:
        ranks = results if mode == "together" else results[:1]
        wall_s: dict[str, list[float]] = {}
        used_s: dict[str, list[float]] = {}
        for key in results[0]["taken"]:
            if key.startswith(mode):
                name = key.partition("/")[2]
                rounds = list(zip(*(rank["taken"][key] for rank in ranks), strict=True))
                wall_s[name] = [
                    max(r[1] for r in each) - min(r[0] for r in each) for each in rounds
                ]
                used_s[name] = [sum(r[2] for r in each) for each in rounds]
        repeats = ranks[0]["repeats"]
        found[mode] = {
            "gb_per_s": {
                name: round(sum(r["bytes"] for r in ranks) / statistics.median(times) / 1e9, 2)
                for name, times in wall_s.items()
            },
            "ms_each": {
                name: round(1e3 * statistics.median(times) / repeats, 2)
                for name, times in wall_s.items()
            },
            "processor_ms_each": {
                name: round(1e3 * statistics.median(times) / repeats, 2)
                for name, times in used_s.items()
            },
        }
        for way, peer in RATIOS:
            found[mode][f"{way} of {peer}"] = paired(wall_s[peer], wall_s[way])
            found[mode][f"{way} of {peer}, processor"] = paired(used_s[peer], used_s[way])
    return found


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target`` over a connection of ``streams``."""
    connection.sendall(_SIZE.pack(len(target)))
    while target:
        target = target[connection.recv_into(target) :]


def serve_streams(pipe: Connection, size_bytes: int) -> None:
    """Send from memory as many bytes as a connection asks for, each in a thread of its own."""
    view = np.ones(size_bytes, np.uint8).data

    def serve(connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(_SIZE.size, socket.MSG_WAITALL):
                connection.sendall(view[: _SIZE.unpack(asked)[0]])

    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@contextmanager
def streams(size_bytes: int) -> Iterator[int]:
    """Run ``serve_streams`` in a process; give its port."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve_streams, args=(theirs, size_bytes), daemon=True)
    process.start()
    try:
        yield pipe.recv()
    finally:
        process.kill()
        process.join()


def measure(megabytes: int, rounds: int, folder: Path, node: NodeProcess) -> dict[str, Any]:
    """Return what there is to say of one size."""
    fill_memory(descriptor_socket(folder), megabytes)
    _, places = newest([node])
    with running(functools.partial(save_dcp, megabytes=megabytes), NUM_WORKERS, folder) as ranks:
        ranks.results(RUN_S_MAX)
    with streams(2 * megabytes * 10**6) as port:
        function = functools.partial(
            load_rank, megabytes=megabytes, rounds=rounds, places=places, stream_port=port
        )
        with running(function, NUM_LOADERS, folder) as ranks:
            return summary(ranks.results(RUN_S_MAX))


def main() -> None:
    """Print one JSON object a size; ``missed`` names the targets that were not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[3, 50, 300])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plain", action="store_true", help="copies without any tuning")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not options.plain:
        os.environ.update(tuned(os.environ))
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder, keeper(Path(folder)) as node:
            found = measure(megabytes, options.rounds, Path(folder), node)
        missed = [
            f"{mode}: {way} of {peer}"
            for mode, ratios in found.items()
            for (way, peer), least in TARGETS.items()
            if ratios[f"{way} of {peer}"]["median"] < least
        ]
        document = {"megabytes": megabytes, **found, "missed": missed, "load": load_average()}
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
