"""Commit, validity under fencing, search and collection."""

import itertools
import re
import threading
from collections.abc import Callable
from errno import EIO
from pathlib import Path

import pytest

from tests.support.checkpoints import (
    ROOT,
    assert_loaded,
    empty_tensors,
    local_tensors,
    save,
    small_state,
    whole_need,
)
from tests.support.made import save_part, tensor_of
from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ChecksumMismatchError,
    StorageError,
    UncoveredRegionError,
)
from ucp_core.geometry import Box, TensorKey
from ucp_core.lineage import counts
from ucp_core.native import (
    collect_garbage,
    find_committed,
    last_attempt,
    load,
    open_checkpoint,
    try_commit,
    unloadable,
)
from ucp_core.storage import Buffer, LocalStore, MemoryStore, Store, join

DIRECTORY = f"{ROOT}/step-00000007"
STATE = small_state()


def _damage(store: Store, path: str, position: int = 0) -> None:
    data = bytearray(store.read(path))
    data[position] ^= 1
    store.write_atomic(path, data, fsync=False)


def test_a_checkpoint_is_committed_when_the_last_rank_has_saved() -> None:
    """Not before: without its manifest it is invisible."""
    store = MemoryStore()
    save(store, STATE, step=7, world_size=3, ranks=[2, 0])

    assert find_committed(store, ROOT, lineage=[(1, 0)]) is None
    assert not try_commit(store, DIRECTORY, step=7, attempt=1, world_size=3)
    with pytest.raises(CheckpointNotFoundError, match="nothing was committed there"):
        open_checkpoint(store, DIRECTORY)

    assert [r.committed for r in save(store, STATE, step=7, world_size=3, ranks=[1])] == [True]
    found = find_committed(store, ROOT, lineage=[(1, 0)])
    assert found is not None
    assert (found.step, found.attempt, found.directory) == (7, 1, DIRECTORY)


def test_ranks_of_two_attempts_do_not_make_one_checkpoint() -> None:
    """Half a state of each would be a state that never was."""
    store = MemoryStore()
    save(store, STATE, step=7, attempt=1, ranks=[0])
    save(store, STATE, step=7, attempt=2, ranks=[1])

    for attempt in (1, 2):
        assert not try_commit(store, DIRECTORY, step=7, attempt=attempt, world_size=2)
    assert find_committed(store, ROOT, lineage=[]) is None


def test_what_is_committed_is_not_written_again() -> None:
    """A rank whose reply was lost may save twice; the files under a commit must not move."""
    store = MemoryStore()
    save(store, STATE, step=7)
    before = {name: store.read(join(DIRECTORY, name)) for name in store.list(DIRECTORY)}

    results = save(store, small_state(seed=99), step=7)

    assert all(result.committed and result.size_bytes == 0 for result in results)
    assert {name: store.read(join(DIRECTORY, name)) for name in store.list(DIRECTORY)} == before


@pytest.mark.parametrize(
    ("step", "attempt", "lineage", "valid"),
    [
        (7, 1, [], True),
        (7, 1, [(1, 0)], True),
        (7, 1, [(1, 0), (2, 7)], True),
        (7, 1, [(1, 0), (2, 9), (3, 8)], True),
        (7, 1, [(1, 0), (2, 6)], False),
        (7, 1, [(3, 6), (1, 0), (2, 7)], False),
        (7, 2, [(1, 0), (2, 6)], True),
        (7, 3, [(1, 0), (2, 6), (3, 6)], True),
    ],
)
def test_a_commit_counts_unless_a_later_attempt_went_another_way(
    step: int, attempt: int, lineage: list[tuple[int, int]], *, valid: bool
) -> None:
    """A fenced process that was slow can commit a step which the run then did differently."""
    for order in itertools.permutations(lineage):
        assert counts(step=step, attempt=attempt, lineage=order) is valid


def test_what_is_lost_is_what_was_committed_and_counts() -> None:
    """Half a save and a commit of a fenced attempt never were part of the run."""
    store = MemoryStore()
    for step, attempt in ((3, 2), (4, 2), (5, 2), (7, 1)):
        save(store, STATE, step=step, attempt=attempt)
    save(store, STATE, step=8, attempt=2, ranks=[0])
    store.write_atomic(f"{ROOT}/step-00000003/manifest.json", b"{", fsync=False)
    part = next(n for n in store.list(f"{ROOT}/step-00000004") if n.endswith(".bin"))
    store.delete(f"{ROOT}/step-00000004/{part}")

    rows = unloadable(store, ROOT, lineage=[(1, 0), (2, 2)])

    assert [step for step, _ in rows] == [5, 4, 3]
    assert rows[0][1] == "", "only its bytes can tell"
    assert rows[1][1] == f"file {part} is missing"
    assert "manifest.json" in rows[2][1]


def test_data_without_a_manifest_is_lost_only_if_something_was_committed() -> None:
    """Both a deleted manifest and a save that was cut off leave data alone."""
    store = MemoryStore()
    for step in (3, 4):
        save(store, STATE, step=step, attempt=2)
        store.delete(f"{ROOT}/step-{step:08d}/manifest.json")
    save(store, STATE, step=5, attempt=11, ranks=[0])
    store.write_atomic(f"{ROOT}/step-00000006/notes.txt", b"of a person", fsync=False)

    assert unloadable(store, ROOT, lineage=()) == ()
    rows = unloadable(store, ROOT, lineage=(), with_data=True)
    assert [step for step, _ in rows] == [5, 4, 3]
    assert {reason for _, reason in rows} == {"it has data and no manifest.json"}
    assert last_attempt(store, ROOT, store.list(ROOT)) == 11
    assert last_attempt(store, ROOT, ["step-00000003", "step-00000006"]) == 2


def test_a_commit_of_a_fenced_attempt_is_skipped_and_then_replaced() -> None:
    """Attempt 2 resumed from 5, so attempt 1's step 7 is not part of the run."""
    store = MemoryStore()
    lineage = [(1, 0), (2, 5)]
    save(store, STATE, step=5, attempt=1)
    save(store, STATE, step=7, attempt=1)

    found = find_committed(store, ROOT, lineage=lineage)
    assert found is not None
    assert found.step == 5
    assert [name for name, _ in found.skipped] == ["step-00000007"]
    assert "attempt 1 committed it after it was fenced" in found.skipped[0][1]

    other = small_state(seed=2)
    save(store, other, step=7, attempt=2, world_size=3)
    found = find_committed(store, ROOT, lineage=lineage)
    assert found is not None
    assert (found.step, found.attempt, found.skipped) == (7, 2, ())
    need = whole_need(other)
    moved: list[int] = []
    loaded = load(found.checkpoint, need, progress=moved.append)
    assert_loaded(other, need)
    # These distinguish a load of hours from a hang.
    assert sum(moved) >= loaded.size_bytes > 0


def test_a_fenced_attempt_cannot_replace_the_commit_of_a_newer_one() -> None:
    """The last committed version is never overwritten."""
    store = MemoryStore()
    save(store, STATE, step=7, attempt=2)
    before = store.read(join(DIRECTORY, "manifest.json"))

    results = save(store, small_state(seed=3), step=7, attempt=1)

    assert [result.committed for result in results] == [False, False]
    assert store.read(join(DIRECTORY, "manifest.json")) == before


class _PausingStore(MemoryStore):
    """Lets somebody else act in the instant before a manifest is written."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[str] = []
        self.act: Callable[[], object] = lambda: None

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        if path.endswith("manifest.json") and not self.meanwhile:
            self.meanwhile.append(path)
            self.act()
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)


def test_a_newer_commit_in_the_instant_before_ours_stands() -> None:
    """Look first, write after: the newer attempt commits between the two."""
    store = _PausingStore()
    save(store, STATE, step=7, attempt=1, ranks=[0])
    store.act = lambda: save(store, STATE, step=7, attempt=2)

    results = save(store, STATE, step=7, attempt=1, ranks=[1])

    assert [result.committed for result in results] == [False]
    assert open_checkpoint(store, DIRECTORY).attempt == 2


def test_a_commit_that_a_fenced_process_replaced_is_made_again() -> None:
    """Three attempts at one step: the second, delayed, replaces the first's after the third did."""
    store = _PausingStore()
    store.meanwhile.append("not yet")
    save(store, STATE, step=7, attempt=1)
    save(store, STATE, step=7, attempt=2, ranks=[0])
    store.meanwhile.clear()
    store.act = lambda: save(store, STATE, step=7, attempt=3)
    save(store, STATE, step=7, attempt=2, ranks=[1])
    assert open_checkpoint(store, DIRECTORY).attempt == 2

    found = find_committed(store, ROOT, lineage=[(1, 0), (2, 5), (3, 5)])

    assert found is not None
    assert (found.step, found.attempt) == (7, 3)
    assert open_checkpoint(store, DIRECTORY).attempt == 3


def test_ranks_that_finish_together_commit_once_and_all_know(tmp_path: Path) -> None:
    """On real files, by threads that start at one barrier."""
    store = LocalStore()
    root = str(tmp_path)
    for step in range(10, 30):
        barrier = threading.Barrier(4)
        committed: list[bool] = []

        def one(rank: int, step: int = step, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            committed.extend(  # noqa: B023 - joined below, before the next step
                r.committed
                for r in save(store, STATE, step=step, world_size=4, ranks=[rank], root=root)
            )

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert any(committed)
        found = find_committed(store, root, lineage=[])
        assert found is not None
        assert (found.step, found.skipped) == (step, ())


def _truncate(store: Store, name: str) -> None:
    path = join(DIRECTORY, name)
    store.write_atomic(path, store.read(path)[:-1], fsync=False)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda s: s.delete(join(DIRECTORY, "manifest.json")), "nothing was committed"),
        (lambda s: _truncate(s, "manifest.json"), "cut short or was edited"),
        (lambda s: _damage(s, join(DIRECTORY, "manifest.json"), 99), "is damaged"),
        (lambda s: s.write_atomic(join(DIRECTORY, "manifest.json"), b"", fsync=False), "cut short"),
        (lambda s: s.delete(join(DIRECTORY, "a0001-r00001.bin")), "r00001.bin is missing"),
        (lambda s: _truncate(s, "a0001-r00000.bin"), "r00000.bin has .* bytes, not"),
    ],
    ids=["uncommitted", "cut manifest", "damaged manifest", "empty", "missing", "truncated"],
)
def test_a_damaged_checkpoint_is_named_skipped_and_kept(
    harm: Callable[[Store], None], reason: str
) -> None:
    """The older one is used; what is left may still help a person, so nothing is deleted."""
    store = MemoryStore()
    save(store, STATE, step=5)
    save(store, STATE, step=7)
    harm(store)
    left = store.list(DIRECTORY)

    found = find_committed(store, ROOT, lineage=[(1, 0)])

    assert found is not None
    assert found.step == 5
    ((name, text),) = found.skipped
    assert name == "step-00000007"
    assert re.search(reason, text), text
    assert store.list(DIRECTORY) == left


def test_damaged_bytes_are_found_when_loaded_and_the_version_can_be_excluded() -> None:
    """The search reads no tensor; the caller falls back after the error."""
    store = MemoryStore()
    save(store, STATE, step=5)
    save(store, STATE, step=7)
    _damage(store, join(DIRECTORY, "a0001-r00000.bin"))
    found = find_committed(store, ROOT, lineage=[])
    assert found is not None
    assert found.step == 7

    with pytest.raises(ChecksumMismatchError, match=r"is damaged in bytes 0 to .*r00000.bin"):
        load(found.checkpoint, whole_need(STATE))
    again = find_committed(store, ROOT, lineage=[], exclude=frozenset({"step-00000007"}))

    assert again is not None
    assert again.step == 5
    assert again.skipped[0][0] == "step-00000007"


def test_strange_names_in_the_directory_are_ignored() -> None:
    """Editors, operators and file systems leave things."""
    store = MemoryStore()
    save(store, STATE, step=7)
    for name in ("latest", "step-7", "step-0000000x", "step-00000009.bak", "README"):
        store.write_atomic(join(ROOT, name), b"", fsync=False)

    found = find_committed(store, ROOT, lineage=[])

    assert found is not None
    assert (found.step, found.skipped) == (7, ())


def test_a_part_that_no_rank_saved_stops_the_commit() -> None:
    """The proof runs before the commit, so that a hole is found while the state still lives."""
    store = MemoryStore()
    held = {TensorKey("wte", "weight"): [Box((0, 0), (7, 4))]}

    with pytest.raises(UncoveredRegionError, match=r"wte \(weight\): box \[7:8, 0:4\]"):
        save_part(store, DIRECTORY, local_tensors(STATE, held), step=7)
    assert find_committed(store, ROOT, lineage=[]) is None


def test_replicas_are_not_written() -> None:
    """Data-parallel copies cost memory, not storage."""
    store = MemoryStore()
    key = TensorKey("wte", "weight")
    (whole,) = local_tensors(STATE, {key: [Box.full((8, 4))]})
    copy = tensor_of(
        whole.fqn,
        whole.shape,
        whole.data,
        slot=whole.slot,
        dtype=whole.dtype,
        replica=True,
        box=whole.box,
    )
    sizes = [
        save_part(store, DIRECTORY, [tensor], step=7, rank=rank, world_size=2).size_bytes
        for rank, tensor in enumerate((whole, copy))
    ]

    assert sizes == [128, 0]
    need = empty_tensors(STATE, {key: [Box.full((8, 4))]})
    load(open_checkpoint(store, DIRECTORY), need)
    assert_loaded(STATE, need)


def test_a_record_of_somebody_else_stops_the_commit() -> None:
    """A file copied by hand to another step must not be taken for this one's."""
    store = MemoryStore()
    save(store, STATE, step=5, ranks=[1])
    save(store, STATE, step=7, ranks=[0])
    for end in ("json", "bin"):
        data = store.read(f"{ROOT}/step-00000005/a0001-r00001.{end}")
        store.write_atomic(f"{DIRECTORY}/a0001-r00001.{end}", data, fsync=False)

    with pytest.raises(CheckpointCorruptError, match=r"r00001.json says .* 5, 1, 1, 2"):
        try_commit(store, DIRECTORY, step=7, attempt=1, world_size=2)


def test_collecting_keeps_the_newest_valid_ones_and_what_is_under_way() -> None:
    """Damaged and uncommitted ones do not count, newer ones are not touched."""
    store = MemoryStore()
    for step in (1, 2, 3, 4):
        save(store, STATE, step=step)
    store.delete(f"{ROOT}/step-00000003/manifest.json")
    save(store, STATE, step=5, ranks=[0])

    assert collect_garbage(store, ROOT, keep=9, lineage=[]) == []
    deleted = collect_garbage(store, ROOT, keep=2, lineage=[])

    assert deleted == ["step-00000001"]
    assert store.list(ROOT) == tuple(f"step-0000000{step}" for step in (2, 3, 4, 5))
    assert collect_garbage(store, ROOT, keep=1, lineage=[]) == ["step-00000003", "step-00000002"]


class _ForbiddenStore(MemoryStore):
    is_forbidden = False

    def read(self, path: str) -> bytes:
        if not self.is_forbidden:
            return super().read(path)
        raise StorageError(f"{path} is not permitted", path=path, missing=False)


def test_a_storage_that_refuses_is_not_an_empty_one() -> None:
    """Starting from scratch because a password expired would throw the run away."""
    store = _ForbiddenStore()
    save(store, STATE, step=7, ranks=[0])
    store.write_atomic(join(DIRECTORY, "manifest.json"), b"", fsync=False)
    store.is_forbidden = True

    with pytest.raises(StorageError, match="not permitted"):
        open_checkpoint(store, DIRECTORY)
    with pytest.raises(StorageError, match="not permitted"):
        find_committed(store, ROOT, lineage=[])


class _ForgetfulStore(MemoryStore):
    """Refuses one checkpoint, by ``facts`` of its error."""

    def __init__(self, **facts: object) -> None:
        super().__init__()
        self.facts: dict[str, object] = {}
        self._later = facts

    def read(self, path: str) -> bytes:
        if self.facts and "step-00000008/manifest.json" in path:
            raise StorageError(f"{path} is refused", path=path, **self.facts)
        return super().read(path)

    def refuse(self) -> None:
        self.facts = self._later


def test_no_reader_goes_to_an_older_version_if_storage_refuses_the_newest() -> None:
    """It may answer a moment later; a block that the disk cannot read is damage."""
    for errno, damaged in ((None, None), (EIO, (8,))):
        store = _ForgetfulStore(missing=False, errno=errno)
        for step in (7, 8):
            save(store, STATE, step=step)
        store.refuse()
        if damaged is None:
            with pytest.raises(StorageError, match="is refused"):
                find_committed(store, ROOT, lineage=[])
            continue
        found = find_committed(store, ROOT, lineage=[])
        assert found is not None
        assert (found.step, found.damaged) == (7, damaged)
