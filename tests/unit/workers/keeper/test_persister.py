"""From memory to storage in the background: everything but bad versions, and no rank waits."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from tests.support.snapshots import (
    StallingStore,
    body_bytes,
    eventually,
    part,
    snapshot,
    weights,
)
from ucp_core.errors import StorageError
from ucp_core.native import load, open_checkpoint
from ucp_core.storage import Buffer, LocalStore, MemoryStore, Store, claim
from workers.keeper import persister as persister_module
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.node_memory import Problems
from workers.keeper.persister import Persister
from workers.memory import Arena, descriptor_socket, open_arena
from workers.settings import CheckpointSettings

WORLD = 2
Persisting: TypeAlias = Callable[..., AbstractContextManager[Persister]]


@pytest.fixture
def problems() -> Problems:
    return Problems()


@pytest.fixture
def table() -> Iterator[ArenaTable]:
    table = ArenaTable(budget_bytes=1 << 30)
    yield table
    for name in table.arenas():
        table.drop(name)


@pytest.fixture
def persisting(table: ArenaTable, problems: Problems) -> Persisting:
    @contextmanager
    def persist(
        store: Store, directory: str = "run", *, keep: int = 0, fsync: bool = False
    ) -> Iterator[Persister]:
        persister = Persister(
            table, store, directory, CheckpointSettings(keep=keep, fsync=fsync), problems.note,
            pauses_s=(0.01, 0.01),
        )  # fmt: skip
        yield persister
        persister.close()

    return persist


def _arenas(table: ArenaTable, world: int = WORLD) -> list[Arena]:
    return [table.reserve(f"w{rank:04d}.1", body_bytes=body_bytes(world)) for rank in range(world)]


def _save(
    table: ArenaTable, arenas: list[Arena], step: int, *, pin: bool = True, attempt: int = 1
) -> None:
    for rank, arena in enumerate(arenas):
        snapshot(
            arena, step, attempt=attempt, rank=rank, world=len(arenas), pin=pin,
            lineage=table.lineage,
        )  # fmt: skip
    table.tell()


def _has_stored(persister: Persister, step: int) -> bool:
    return persister.stored[1] == step


def _check_stored(store: Store, step: int, directory: str = "run") -> None:
    checkpoint = open_checkpoint(store, f"{directory}/checkpoints/step-{step:08d}")
    whole = part(0, 0, 1)
    load(checkpoint, [whole])
    assert bytes(whole.data) == weights(step).tobytes()
    assert checkpoint.extra == {"cursor": step}


def test_what_is_pinned_becomes_a_checkpoint(
    table: ArenaTable,
    problems: Problems,
    persisting: Persisting,
    tmp_path: Path,
) -> None:
    """Bit for bit the state, to be loaded under any layout; and the buffers are free again."""
    arenas, store = _arenas(table), LocalStore()
    with persisting(store, str(tmp_path)) as persister:
        _save(table, arenas, 7)

        assert eventually(lambda: not any(a.pinned() is not None for a in arenas))
        assert persister.stored[1] == 7
    _check_stored(store, 7, str(tmp_path))
    assert problems.lines() == ()


def test_what_is_not_pinned_is_not_stored(table: ArenaTable, persisting: Persisting) -> None:
    """Snapshots are taken far more often than storage could take them."""
    arenas, store = _arenas(table), MemoryStore()
    with persisting(store):
        _save(table, arenas, 1, pin=False)
        _save(table, arenas, 2)
        assert eventually(lambda: not any(a.pinned() is not None for a in arenas))
        _save(table, arenas, 3, pin=False)

    assert store.list("run/checkpoints") == ("step-00000002",)


def test_a_stalled_store_holds_up_one_buffer_and_nothing_else(
    table: ArenaTable,
    persisting: Persisting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For minutes: snapshots go on beside the pinned one, the door answers, and it is said."""
    monkeypatch.setattr(persister_module, "_SILENT_S", 0.05)
    (arena,), store = _arenas(table, 1), StallingStore()
    door = DescriptorServer(descriptor_socket(tmp_path), table)
    with persisting(store) as persister:
        _save(table, [arena], 1)
        assert store.is_stalled.wait(20.0)

        for step in range(2, 12):
            _save(table, [arena], step, pin=False)
        open_arena(descriptor_socket(tmp_path), "w0000.1").close()
        assert [held.step for held in arena.versions()] == [1, 10, 11]
        assert eventually(lambda: "silent for" in persister.silence)
        assert persister.stored[1] == 0

        store.may_go_on.set()
        assert eventually(lambda: arena.pinned() is None)
        assert persister.silence == ""
    _check_stored(store, 1)
    door.close()


@pytest.mark.parametrize("where", ["data", "record"])
def test_a_flipped_bit_is_not_stored(
    table: ArenaTable,
    problems: Problems,
    persisting: Persisting,
    where: str,
) -> None:
    """Poison in storage would be found when it is needed. The buffer is no longer offered."""
    (arena,), store = _arenas(table, 1), MemoryStore()
    good = snapshot(arena, 1)
    bad = snapshot(arena, 2)
    position = bad.data_bytes // 3 if where == "data" else bad.data_bytes + bad.record_bytes // 3
    arena.body(bad.buffer)[position] ^= 0x10
    arena.pin(bad.buffer)
    with persisting(store) as persister:
        table.tell()

        assert eventually(lambda: arena.pinned() is None)
        assert persister.stored[1] == 0
    assert store.list("run/checkpoints/step-00000002") == ()
    assert arena.versions() == [good]
    assert any("damaged" in line and "dropped" in line for line in problems.lines())
    assert arena.choose(()) != good.buffer


def test_a_buffer_that_is_written_over_meanwhile_is_never_committed(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """A zombie keeps to no pin: half of one version and half of another is none."""
    (arena,), store = _arenas(table, 1), StallingStore()
    held = snapshot(arena, 1, pin=True)
    with persisting(store):
        table.tell()
        assert store.is_stalled.wait(20.0)
        arena.begin(held.buffer, attempt=1, step=9, rank=0, world_size=1)
        np.frombuffer(arena.body(held.buffer), np.uint8)[:] = 7
        arena.finish(held.buffer, data_bytes=held.data_bytes, record_bytes=held.record_bytes)
        store.may_go_on.set()

        assert eventually(lambda: arena.pinned() is None)
    assert store.list("run/checkpoints/step-00000001") == ()
    assert problems.lines() == (), "no memory is damaged, the writer only went on"


class _FailingStore(MemoryStore):
    """Is full for so many writes."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise StorageError(f"{path} does not fit: the file system is full", path=path)
        return super().write_file(path, chunks, fsync=fsync)


def test_a_store_that_fails_for_a_moment_is_tried_again(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """Most failures of a network are over in a second."""
    arenas, store = _arenas(table), _FailingStore(2)
    with persisting(store) as persister:
        _save(table, arenas, 3)

        assert eventually(lambda: persister.stored[1] == 3)
    assert problems.lines() == ()


def test_a_full_store_is_an_event_and_the_next_version_is_tried(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """Training must not fail for it; people must hear of it."""
    (arena,), store = _arenas(table, 1), _FailingStore(3)
    with persisting(store) as persister:
        _save(table, [arena], 3)
        assert eventually(lambda: arena.pinned() is None)
        (line,) = problems.lines()
        assert "step 3 is not stored" in line
        assert "the file system is full" in line

        _save(table, [arena], 6)
        assert eventually(lambda: persister.stored[1] == 6)
        assert eventually(lambda: problems.lines() == ())
    assert store.list("run/checkpoints") == ("step-00000006",)


def test_a_version_of_a_fenced_attempt_is_not_stored(
    table: ArenaTable, persisting: Persisting
) -> None:
    """It would be a checkpoint that does not count, in the way of one that does."""
    (arena,), store = _arenas(table, 1), MemoryStore()
    with persisting(store):
        table.fence(2, [(1, 0), (2, 4)])
        snapshot(arena, 5, attempt=1, pin=True)
        table.tell()

        assert eventually(lambda: arena.pinned() is None)
    assert store.list("run/checkpoints") == ()


def test_a_part_whose_version_still_counts_is_stored_after_the_fence(
    table: ArenaTable, persisting: Persisting
) -> None:
    """The new attempt resumed from it: should memory be lost now, it is all there is."""
    arenas, store = _arenas(table), MemoryStore()
    _save(table, arenas, 4)
    table.fence(2, [(1, 0), (2, 4)])
    with persisting(store) as persister:
        assert eventually(lambda: persister.stored[1] == 4)
        table.fence(3, [(1, 0), (2, 4), (3, 2)])
        assert persister.stored[1] == 0
    _check_stored(store, 4)


def test_old_checkpoints_go_only_when_the_history_is_known(
    table: ArenaTable, persisting: Persisting
) -> None:
    """A keeper that was just started knows no lineage and would take dead ones for good ones."""
    (arena,), store = _arenas(table, 1), MemoryStore()
    with persisting(store, keep=1) as persister:
        for step in (1, 2):
            _save(table, [arena], step)
            assert eventually(partial(_has_stored, persister, step))
        assert eventually(lambda: arena.pinned() is None)
        assert len(store.list("run/checkpoints")) == 2

        table.fence(1, [(1, 0)])
        _save(table, [arena], 3)
        assert eventually(lambda: not store.exists("run/checkpoints/step-00000001/manifest.json"))
    _check_stored(store, 3)


class _StaleStore(MemoryStore):
    """Cannot delete, and says so as a file system does that was mounted again."""

    def delete(self, path: str) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


def test_whatever_is_wrong_with_old_checkpoints_the_next_one_is_stored(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """One thread stores and deletes: if it ended, a buffer would stay pinned for ever."""
    (arena,), store = _arenas(table, 1), _StaleStore()
    table.fence(1, [(1, 0)])
    with persisting(store, keep=1) as persister:
        for step in (1, 2, 3):
            _save(table, [arena], step)
            assert eventually(partial(_has_stored, persister, step))
            assert eventually(lambda: arena.pinned() is None)
        assert any("old checkpoints are not deleted" in line for line in problems.lines())


def test_flush_stores_what_was_not_due(table: ArenaTable, persisting: Persisting) -> None:
    """The last version of a run that ends early; a rank whose node is gone is here as a copy."""
    own, store = table.reserve("w0000.1", body_bytes=body_bytes(2)), MemoryStore()
    snapshot(own, 5, rank=0, world=2)
    with persisting(store) as persister:
        assert not persister.flush(1, 5)
        copy = table.reserve("0123456789ab/w0001.1", body_bytes=body_bytes(2))
        snapshot(copy, 5, rank=1, world=2)
        snapshot(copy, 6, rank=1, world=2)
        parity = table.reserve("parity/0.1", body_bytes=body_bytes(2))
        parity.begin(0, attempt=1, step=5, rank=0, world_size=2)
        parity.finish(0, data_bytes=100, record_bytes=100)

        assert persister.flush(1, 5)
        assert len(parity.versions()) == 1, "it is no rank's, and nothing is wrong with it"
        assert persister.stored[1] == 5
    _check_stored(store, 5)
    assert store.list("run/checkpoints") == ("step-00000005",)


def test_every_keeper_that_flushes_knows_of_the_commit(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """The one that is done first waits for the one that commits."""
    store, other = MemoryStore(), ArenaTable(budget_bytes=1 << 30)
    arenas = [each.reserve("w0001.1", body_bytes=body_bytes(2)) for each in (table, other)]
    for rank, arena in enumerate(arenas):
        snapshot(arena, 5, rank=rank, world=2)
    theirs = Persister(
        other, store, "run", CheckpointSettings(), problems.note, pauses_s=[0.01] * 2000
    )
    with ThreadPoolExecutor() as pool, persisting(store) as mine:
        first = pool.submit(theirs.flush, 1, 5)
        assert eventually(lambda: store.exists("run/checkpoints/step-00000005/a0001-r00001.json"))
        assert not first.done()
        assert mine.flush(1, 5)
        assert first.result(20.0)
    theirs.close()
    other.drop("w0001.1")


def test_a_part_that_is_stored_already_is_not_written_again(
    table: ArenaTable, persisting: Persisting
) -> None:
    """A keeper that was restarted finds the pins of the one before."""
    (arena,), store = _arenas(table, 1), MemoryStore()
    with persisting(store) as persister:
        _save(table, [arena], 1)
        assert eventually(lambda: arena.pinned() is None)
    full = _FailingStore(1)
    full._files = store._files
    arena.pin(arena.versions()[0].buffer)
    with persisting(full) as persister:
        table.tell()
        assert eventually(lambda: persister.stored[1] == 1)


def test_storage_gets_what_training_leaves(persisting: Persisting) -> None:
    """Trainers saturate the processors; only the persister's thread gives way, not its process."""
    with persisting(MemoryStore()) as persister:
        tid = persister._thread.native_id
        assert tid is not None
        own = os.getpriority(os.PRIO_PROCESS, 0)

        assert eventually(lambda: os.getpriority(os.PRIO_PROCESS, tid) >= max(own, 10))
        assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_keeper_of_a_superseded_claim_stores_and_deletes_nothing_more(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """Its trainers do not know yet and save on. It says who has the directory."""
    arenas, store = _arenas(table), MemoryStore()
    claim(store, "run", 1, {"token": "a"})
    table.fence(1, ((1, 0),))
    table.claim = 1
    with persisting(store, keep=1) as persister:
        _save(table, arenas, 7)
        assert eventually(lambda: _has_stored(persister, 7))
        claim(store, "run", 2, {"token": "b", "host": "head-of-b"})
        _save(table, arenas, 8)

        assert eventually(lambda: any("claim 2" in line for line in problems.lines()))
        persister.close()
    _check_stored(store, 7)
    assert not store.exists("run/checkpoints/step-00000008/manifest.json")


def test_a_restarted_keeper_looks_before_it_writes_a_part(
    table: ArenaTable, problems: Problems, persisting: Persisting
) -> None:
    """The newer claimant may have given the same number to an attempt of its own."""
    store = MemoryStore()
    claim(store, "run", 1, {"token": "a"})
    claim(store, "run", 2, {"token": "b"})
    table.claim = 1
    with persisting(store):
        _save(table, _arenas(table), 7)
        assert eventually(lambda: any("claim 2" in line for line in problems.lines()))
    assert store.list("run/checkpoints") == ()
