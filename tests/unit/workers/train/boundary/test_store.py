import errno
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.made import assignment_of, tensor_of
from tests.support.snapshots import eventually
from ucp_core.errors import StorageError, SupersededError
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from ucp_core.native import MANIFEST_NAME, find_committed
from ucp_core.storage import Buffer, MemoryStore, claim
from workers.collectives import AbortedError, CollectiveError
from workers.protocol import CHECKPOINTS
from workers.settings import CheckpointSettings
from workers.train.boundary import store as store_module
from workers.train.boundary.store import StorageWriter


def storing(
    store: MemoryStore,
    fenced: threading.Event,
    *,
    rank: int = 0,
    num_workers: int = 1,
    keep: int = 0,
    claim: int = 0,
    moved: Callable[[int], None] = lambda _: None,
) -> StorageWriter:
    assignment = assignment_of(rank, layout=ParallelLayout(dp_shard=num_workers), claim=claim)
    return StorageWriter(
        store=store,
        directory="run",
        assignment=assignment,
        settings=CheckpointSettings(keep=keep),
        fenced=fenced.is_set,
        moved=moved,
    )


def state(step: int, *, rows: tuple[int, int] = (0, 4)) -> dict[str, Any]:
    start, stop = rows
    tensor = tensor_of(
        "w",
        (4,),
        memoryview(bytearray(b"0123456789abcdef"))[4 * start : 4 * stop],
        box=Box((start,), (stop,)),
    )
    groups: list[dict[str, Any]] = [{"lr": 0.1, "params": ["w"]}]
    return {"step": step, "tensors": [tensor], "extra": {"loss": 1.0}, "param_groups": groups}


def committed_step(store: MemoryStore) -> int:
    found = find_committed(store, f"run/{CHECKPOINTS}", lineage=((1, 0),))
    return found.step if found is not None else 0


def test_the_line_of_a_step_is_there_before_its_commit() -> None:
    """A worker can die at any point; a committed step without a line would look lost."""
    store, fenced = MemoryStore(), threading.Event()
    moved: list[int] = []
    background = storing(store, fenced, moved=moved.append)

    background.append("metrics/rank0.jsonl", {"step": 1})
    background.save(**state(1))
    background.wait_committed(1, timeout_s=10)

    assert json.loads(store.read("run/metrics/rank0.jsonl")) == {"step": 1}
    assert background.close()
    assert sum(moved) == len(state(1)["tensors"][0].data)


def test_half_a_line_of_a_killed_worker_does_not_spoil_the_next() -> None:
    """A kill can come between two pages of one write; the next step has its line all the same."""
    store, fenced = MemoryStore(), threading.Event()
    store.append("run/metrics/rank0.jsonl", b'{"step": 1}\n{"step": 2, "lo')
    writer = storing(store, fenced)
    writer.append("metrics/rank0.jsonl", {"step": 2})
    writer.append("metrics/rank0.jsonl", {"step": 3})
    assert writer.close()

    lines = store.read("run/metrics/rank0.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines if line.endswith("}")] == [1, 2, 3]


class _Filling(MemoryStore):
    """Takes half of what is appended while it is full."""

    is_full = False
    why = errno.EIO

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        if not self.is_full:
            super().append(path, data, fsync=fsync)
            return
        super().append(path, bytes(data)[: len(bytes(data)) // 2], fsync=fsync)
        raise StorageError(f"{path} failed: No space left on device", path=path, errno=self.why)


def test_lines_that_did_not_fit_are_written_once_they_do() -> None:
    """Training goes on while a disk is full; who counts its steps later must find each."""
    store = _Filling()
    writer = storing(store, threading.Event())
    for step in (1, 2, 3, 4):
        store.is_full = step in (2, 3)
        writer.append("metrics/rank0.jsonl", {"step": step})
        writer.wait_appended(20)
    writer.wait_idle()
    assert writer.close()

    lines = store.read("run/metrics/rank0.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in lines if line.endswith("}")] == [1, 2, 3, 4]


def test_no_step_is_committed_whose_line_does_not_fit() -> None:
    store = _Filling()
    writer = storing(store, threading.Event())
    store.is_full = True
    writer.append("metrics/rank0.jsonl", {"step": 1})
    writer.save(**state(1))

    with pytest.raises(StorageError, match="No space left"):
        writer.wait_committed(1, timeout_s=20)
    assert writer.close()
    assert committed_step(store) == 0


def test_a_step_waits_for_room_and_is_stored_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt failed at its last step, again and again, and said nothing."""
    monkeypatch.setattr(store_module, "_FULL_PAUSE_S", 0.01)
    store = _Filling()
    writer = storing(store, threading.Event())
    store.is_full, store.why = True, errno.ENOSPC
    writer.append("metrics/rank0.jsonl", {"step": 1})
    writer.save(**state(1))
    assert eventually(lambda: "step 1 is not stored" in writer.trouble)
    assert not writer.is_idle

    store.is_full = False
    writer.wait_committed(1, timeout_s=20)
    writer.write_result(b"{}")

    assert writer.trouble == ""
    assert writer.close()
    assert committed_step(store) == 1


def test_no_rank_waits_for_room_after_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt needs the process."""
    monkeypatch.setattr(store_module, "_FULL_PAUSE_S", 0.01)
    store, fenced = _Filling(), threading.Event()
    writer = storing(store, fenced)
    store.is_full, store.why = True, errno.ENOSPC
    writer.append("metrics/rank0.jsonl", {"step": 1})
    writer.save(**state(1))
    assert eventually(lambda: bool(writer.trouble))

    fenced.set()

    assert writer.close()
    assert committed_step(store) == 0


def test_nothing_is_written_after_the_fence() -> None:
    """The state was handed over before it, and would be committed by the background later."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced)
    fenced.set()

    background.save(**state(1))
    background.append("metrics/rank0.jsonl", {"step": 1})

    assert background.close()
    assert committed_step(store) == 0
    assert not store.exists("run/metrics/rank0.jsonl")


def test_lines_that_the_fence_held_back_are_told_late_in_order_and_states_are_not() -> None:
    """A version that is completed on the way out counts, and has the lines of its steps."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced)
    background.append("metrics/rank0.jsonl", {"step": 1})
    background.wait_appended(20)
    fenced.set()
    background.append("metrics/rank0.jsonl", {"step": 2})
    background.save(**state(2))
    background.append_late(time.monotonic() + 20)
    background.append("metrics/rank0.jsonl", {"step": 3})
    background.wait_appended(20)

    told = store.read("run/metrics/rank0.jsonl").decode().splitlines()
    assert [json.loads(line)["step"] for line in told] == [1, 2, 3]
    background.append_late(time.monotonic())
    background.append("metrics/rank0.jsonl", {"step": 4})
    assert background.close()
    assert store.read("run/metrics/rank0.jsonl").decode().splitlines() == told
    assert committed_step(store) == 0


def test_a_wait_ends_by_the_fence() -> None:
    """The other ranks' parts will not come once the attempt is over."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced, num_workers=2)
    background.save(**state(1))
    background.wait_idle()
    threading.Timer(0.05, fenced.set).start()

    with pytest.raises(AbortedError):
        background.wait_committed(1, timeout_s=60)
    assert background.close()


def test_a_peer_that_never_writes_counts_as_lost() -> None:
    """It is a fault of the world, not of the training code."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced, num_workers=2)
    background.save(**state(1))

    with pytest.raises(CollectiveError, match="step 1 was not committed"):
        background.wait_committed(1, timeout_s=0.05)
    assert background.close()


def test_a_damaged_manifest_of_an_older_attempt_is_waited_past() -> None:
    """The step is done again because of it: whoever wrote its part first met it until the commit.

    It would have ended the attempt for an error of the script, and the next one likewise.
    """
    store, fenced = MemoryStore(), threading.Event()
    directory = f"run/{CHECKPOINTS}/step-00000001"
    store.write_atomic(f"{directory}/{MANIFEST_NAME}", b"{half", fsync=False)
    first, second = (storing(store, fenced, rank=rank, num_workers=2) for rank in (0, 1))
    first.save(**state(1, rows=(0, 2)))
    with pytest.raises(CollectiveError, match="step 1 was not committed"):
        first.wait_committed(1, timeout_s=0.05)

    second.save(**state(1, rows=(2, 4)))

    first.wait_committed(1, timeout_s=60)
    assert committed_step(store) == 1
    assert first.close()
    assert second.close()


def test_only_the_newest_are_kept() -> None:
    """Disks are finite; the newest but one is kept in case the newest is damaged."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced, keep=2)

    for step in range(1, 6):
        background.wait_idle()
        background.save(**state(step))

    assert background.close()
    assert store.list(f"run/{CHECKPOINTS}") == ("step-00000004", "step-00000005")


class _Undeletable(MemoryStore):
    """A bucket that one may write to and not delete from."""

    def delete(self, path: str) -> None:
        raise StorageError(f"{path} cannot be deleted", path=path)


def test_what_cannot_be_collected_does_not_stop_the_training() -> None:
    """The checkpoints are committed; that old ones stay costs room, and no step."""
    store, fenced = _Undeletable(), threading.Event()
    background = storing(store, fenced, keep=1)
    for step in (1, 2, 3):
        background.save(**state(step))
        background.wait_committed(step, timeout_s=10)
    background.wait_appended(10)
    background.wait_idle()
    assert committed_step(store) == 3
    assert background.close()


def test_a_storage_that_refuses_stops_the_training() -> None:
    """Steps that can never be committed are not worth taking."""
    store, fenced = MemoryStore(), threading.Event()
    background = storing(store, fenced)
    broken = state(1)
    broken["tensors"][0].data.release()

    background.save(**broken)

    with pytest.raises(ValueError, match="released"):
        background.wait_idle()
    assert background.close()


def test_a_rank_of_a_superseded_claim_commits_collects_and_logs_nothing_more() -> None:
    """Its cluster is out of reach and trains on: storage says that the run goes on elsewhere."""
    store, fenced = MemoryStore(), threading.Event()
    claim(store, "run", 1, {"token": "a"})
    writer = storing(store, fenced, keep=1, claim=1)
    for step in (1, 2):
        writer.save(**state(step))
        writer.wait_committed(step, timeout_s=10)
    claim(store, "run", 2, {"token": "b"})
    before = store.list("run/checkpoints")

    writer.save(**state(3))
    with pytest.raises(SupersededError, match="claim 2"):
        writer.wait_committed(3, timeout_s=10)
    with pytest.raises(SupersededError, match="claim 2"):
        writer.append("metrics/rank0.jsonl", {"step": 3})

    assert writer.close()
    assert committed_step(store) == 2
    assert set(before) <= set(store.list("run/checkpoints"))
    assert not store.exists("run/metrics/rank0.jsonl")


def test_lines_alone_tell_a_rank_that_it_is_superseded() -> None:
    """Keepers store its state, so lines are all that rank 0 writes by itself."""
    store, fenced = MemoryStore(), threading.Event()
    claim(store, "run", 1, {"token": "a"})
    claim(store, "run", 2, {"token": "b"})
    writer = storing(store, fenced, claim=1)

    def append_on() -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            writer.append("metrics/rank0.jsonl", {"step": 1})
            time.sleep(0.01)

    with pytest.raises(SupersededError):
        append_on()
    assert writer.close()
    assert not store.exists("run/metrics/rank0.jsonl")
