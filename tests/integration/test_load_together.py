"""Four real ranks over gloo read a checkpoint once between them."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.support.made import assignment_of, save_part, tensor_of
from tests.support.ranks import Place, running
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from ucp_core.native import LocalTensor, load, load_together, open_checkpoint, save_rank
from ucp_core.storage import LocalStore, ReadRange
from workers.keeper import progress_path
from workers.protocol import FoundBad
from workers.settings import CheckpointSettings, Settings
from workers.state import HostBuffer, StateEntry
from workers.telemetry import ProgressRecord
from workers.train import WorkerContext
from workers.train.loading.restore import GroupTransport, UnloadableSignal, restore_state

NUM_RANKS = 4
ROWS, COLUMNS, LAYERS = 512, 1024, 12


class _Counting(LocalStore):
    """Notes how many bytes are read of data files."""

    def __init__(self) -> None:
        super().__init__()
        #: One list for the store and those that it is bound to a folder by.
        self._counted: list[int] = []

    @property
    def read_bytes(self) -> int:
        return sum(self._counted)

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        self._counted.append(sum(len(buffer) for _, buffers in ranges for buffer in buffers))
        super().read_ranges(path, ranges)


def _state(value: int | None) -> list[LocalTensor]:
    """Return tensors of random numbers from ``value``, or of ones to be filled."""
    found: list[LocalTensor] = []
    for layer in range(LAYERS):
        array = np.ones((ROWS, COLUMNS), np.float32)
        if value is not None:
            generator = np.random.default_rng(value + layer)
            array = generator.standard_normal(array.shape, np.float32)
        box = Box.full(array.shape)
        fqn = f"layers.{layer}"
        found.append(tensor_of(fqn, box.stop, array.data, box=box))
    return found


def _load(place: Place) -> tuple[int, bool]:
    """Load as one of the ranks; return what it read, and whether all is as it was saved."""
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", place.port),
        rank=place.rank,
        world_size=NUM_RANKS,
    )
    try:
        store = _Counting()
        need = _state(None)
        opened = open_checkpoint(store, str(place.directory / "step-00000001"))
        assert dist.group.WORLD is not None
        load_together(
            opened, need, GroupTransport(dist.group.WORLD, torch.device("cpu")), threads=1
        )
        good = all(a.data == b.data for a, b in zip(need, _state(7), strict=True))
        return store.read_bytes, good
    finally:
        dist.destroy_process_group()


def _context(place: Place, store: LocalStore) -> WorkerContext:
    """Return a worker of which nothing is asked but where things are."""
    worker = f"w{place.rank:04d}"
    return WorkerContext(
        worker=worker,
        settings=Settings(checkpoint=CheckpointSettings(threads=1)),
        store=store,
        directory=str(place.directory),
        progress=ProgressRecord.create(progress_path(place.directory, worker), worker=worker),
        ring_path="",
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )


def _restore(place: Place) -> tuple[int, list[FoundBad], int, bool]:
    """Restore as one of 2 replicas x 2 shards: the newest version, and then the one before."""
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", place.port),
        rank=place.rank,
        world_size=NUM_RANKS,
    )
    try:
        groups = [dist.new_group([shard, shard + 2]) for shard in range(2)]
        store = _Counting()
        # As a store that is far away has it.
        store.request_bytes = 2 * LocalStore.request_bytes
        held = _state(None)[place.rank % 2 :: 2]
        entries = [
            StateEntry(
                fqn=tensor.fqn,
                slot=tensor.slot,
                shape=tensor.shape,
                box=tensor.box,
                tensor=torch.from_numpy(np.asarray(tensor.data)),
            )
            for tensor in held
        ]
        context = _context(place, store)
        unloadable: list[FoundBad] = []
        for attempt, resume_step in ((2, 2), (3, 1)):
            try:
                restored = restore_state(
                    assignment_of(
                        place.rank,
                        attempt=attempt,
                        layout=ParallelLayout(dp_replicate=2, dp_shard=2),
                        store_port=place.port,
                        resume=(resume_step, 1),
                        lineage=((1, 0),),
                    ),
                    lambda: entries,
                    context=context,
                    buffer=HostBuffer(),
                    device=torch.device("cpu"),
                    replicas=groups[place.rank % 2],
                )
            except UnloadableSignal as signal:
                unloadable.append(signal.found)
        expected = _state(7)[place.rank % 2 :: 2]
        good = all(a.data == b.data for a, b in zip(held, expected, strict=True))
        return restored.step, unloadable, store.read_bytes, good
    finally:
        dist.destroy_process_group()


def test_replicas_restore_together_or_not_at_all(tmp_path: Path) -> None:
    """One damaged byte is met by one rank of one pair: it alone says that it is damaged."""
    for step, value in ((1, 7), (2, 8)):
        directory = tmp_path / f"checkpoints/step-{step:08d}"
        for rank in range(2):
            save_part(
                LocalStore(),
                str(directory),
                _state(value)[rank::2],
                step=step,
                rank=rank,
                world_size=2,
            )
    damaged = tmp_path / "checkpoints/step-00000002/a0001-r00001.bin"
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))

    with running(_restore, NUM_RANKS, tmp_path) as ranks:
        results = ranks.results()

    assert [(step, len(found), good) for step, found, _, good in results] == [(1, 1, True)] * 4
    assert sum(bool(found[0].damaged) for _, found, _, _ in results) == 1
    # Two versions, of each of which a replica reads half of its shard.
    share_bytes = LAYERS // 2 * ROWS * COLUMNS * 4 / 2
    assert max(read for _, _, read, _ in results) <= 2 * share_bytes + (4 << 20)


def test_each_of_four_replicas_reads_a_quarter(tmp_path: Path) -> None:
    """Without it every replica reads all: n times the traffic of the storage."""
    save = functools.partial(
        save_rank, step=1, attempt=1, extra={}, param_groups=[], source={}, fsync=False
    )
    directory = str(tmp_path / "step-00000001")
    tensors = _state(7)
    for rank in range(2):
        save(LocalStore(), directory, rank=rank, world_size=2, tensors=tensors[rank::2])
    alone = _Counting()
    load(open_checkpoint(alone, directory), _state(None))
    whole_bytes = LAYERS * ROWS * COLUMNS * 4
    assert alone.read_bytes == whole_bytes

    with running(_load, NUM_RANKS, tmp_path) as ranks:
        results = ranks.results()

    assert all(good for _, good in results)
    assert sum(read for read, _ in results) == whole_bytes
    assert max(read for read, _ in results) <= whole_bytes / NUM_RANKS + (2 << 20)
