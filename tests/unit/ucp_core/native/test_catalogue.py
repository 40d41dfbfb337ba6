"""Keeping checkpoints: by locks where the storage has them, by a time of grace elsewhere."""

import uuid
from pathlib import Path

import pytest

from tests.support.checkpoints import (
    assert_loaded,
    save,
    save_not_finite,
    save_with,
    small_state,
    whole_need,
)
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.native import (
    RECHECKED,
    collect_garbage,
    find_committed,
    load,
    newest_finite,
    open_checkpoint,
    reading,
)
from ucp_core.storage import LocalStore, MemoryStore, Store, join, open_store

STATE = small_state()
LINEAGE = [(1, 0)]


def without_locks() -> tuple[Store, str]:
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_what_is_held_is_left_for_the_next_call() -> None:
    """The others go; one reader must not keep them all."""
    store = MemoryStore()
    for step in (1, 2, 3):
        save(store, STATE, step=step, root="run")
    held = open_checkpoint(store, "run/step-00000002")

    with reading(held):
        assert collect_garbage(store, "run", keep=1, lineage=LINEAGE) == ["step-00000001"]
        need = whole_need(STATE)
        load(held, need)
        assert_loaded(STATE, need)

    assert collect_garbage(store, "run", keep=1, lineage=LINEAGE) == ["step-00000002"]


def test_a_checkpoint_behind_a_link_is_never_deleted(tmp_path: Path) -> None:
    """A run that begins from another one's checkpoint may have it so."""
    store = LocalStore()
    theirs, mine = str(tmp_path / "theirs"), tmp_path / "mine"
    save(store, STATE, step=1, root=theirs)
    mine.mkdir()
    (mine / "step-00000001").symlink_to(f"{theirs}/step-00000001")
    for step in (2, 3):
        save(store, STATE, step=step, root=str(mine))

    assert collect_garbage(store, str(mine), keep=1, lineage=LINEAGE) == ["step-00000002"]
    need = whole_need(STATE)
    load(open_checkpoint(store, f"{theirs}/step-00000001"), need)
    assert_loaded(STATE, need)


def test_what_was_deleted_since_it_was_opened_says_so() -> None:
    """Not "a0001-r00000.bin does not exist", which looks like damage."""
    store = MemoryStore()
    for step in (1, 2):
        save(store, STATE, step=step, root="run")
    opened = open_checkpoint(store, "run/step-00000001")
    collect_garbage(store, "run", keep=1, lineage=LINEAGE)

    with pytest.raises(CheckpointNotFoundError, match=r"step-00000001 was deleted since it was"):
        load(opened, whole_need(STATE))


def test_without_locks_an_open_reader_has_a_time_of_grace() -> None:
    """It cannot be opened again, but a reader that has it open reads on."""
    store, root = without_locks()
    for step in (1, 2):
        save(store, STATE, step=step, root=root)
    opened = open_checkpoint(store, join(root, "step-00000001"))

    def collect(at_s: float) -> list[str]:
        return collect_garbage(
            store, root, keep=1, lineage=LINEAGE, grace_s=60.0, now_s=lambda: at_s
        )

    assert collect(1000.0) == []
    with pytest.raises(CheckpointNotFoundError, match="nothing was committed"):
        open_checkpoint(store, join(root, "step-00000001"))
    assert collect(1059.0) == []
    need = whole_need(STATE)
    load(opened, need)
    assert_loaded(STATE, need)

    assert collect(1060.0) == ["step-00000001"]
    assert collect(1061.0) == []
    found = find_committed(store, root, lineage=LINEAGE)
    assert found is not None
    assert found.step == 2


def test_what_was_never_committed_has_no_reader_to_wait_for() -> None:
    """Half-saved steps below the kept ones go at once."""
    store, root = without_locks()
    save(store, STATE, step=1, ranks=[0], root=root)
    save(store, STATE, step=2, root=root)

    assert collect_garbage(store, root, keep=1, lineage=LINEAGE) == ["step-00000001"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_newest_finite_version_is_never_deleted(has_locks: bool) -> None:  # noqa: FBT001
    """NaN at step 50, ``keep: 3``: the finite ones were rotated out (pocket-tts#262).

    Step 4 says of itself that it is well. The one after it knows better: its loss is NaN.
    """
    store, root = (MemoryStore(), "run") if has_locks else without_locks()
    for step in (1, 2, 3, 4):
        save(store, STATE, step=step, root=root)
    for step in (5, 6, 7, 8):
        save_not_finite(store, STATE, step=step, sound_step=3, root=root)
        collect_garbage(store, root, keep=2, lineage=LINEAGE, grace_s=0.0)
        collect_garbage(store, root, keep=2, lineage=LINEAGE, grace_s=0.0)

    assert sorted(store.list(root)) == [f"step-{step:08d}" for step in (3, 7, 8)]
    assert newest_finite(store, root, lineage=LINEAGE) == (8, 3)
    # A later attempt that went back to it.
    lineage = [*LINEAGE, (2, 3)]
    assert newest_finite(store, root, lineage=lineage) == (3, 3)
    for step in (4, 5):
        save(store, STATE, step=step, root=root, attempt=2)
    collect_garbage(store, root, keep=2, lineage=lineage, grace_s=0.0)
    collect_garbage(store, root, keep=2, lineage=lineage, grace_s=0.0)
    assert "step-00000003" not in store.list(root)


def test_the_version_of_the_last_check_is_never_deleted() -> None:
    """Machines that erred since then are in all newer ones, however few are kept."""
    store = MemoryStore()
    for step, checked in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 4), (6, 4), (7, 4)):
        save_with(store, STATE, step=step, root="run", extra={RECHECKED: checked})
        collect_garbage(store, "run", keep=2, lineage=LINEAGE)
        newest = find_committed(store, "run", lineage=[*LINEAGE, (2, checked)])
        assert checked == (newest.step if newest is not None else 0)

    assert sorted(store.list("run")) == [f"step-{step:08d}" for step in (4, 6, 7)]
