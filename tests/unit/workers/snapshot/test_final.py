"""The last snapshot of a rank that leaves early: complete, or nothing that counted is gone."""

import itertools
import time
from dataclasses import dataclass

import pytest
import torch

from tests.support.made import held_of
from tests.support.simulated_device import SimulatedDevice
from tests.support.snapshot_rank import Node, Rank, captured, loaded, state
from tests.support.snapshots import eventually
from workers.memory import Credits
from workers.protocol import Held
from workers.snapshot import Fallback, device, final, writing
from workers.snapshot import buffer_layout as form
from workers.snapshot.buffer_layout import BLOCK_BYTES
from workers.snapshot.final import is_quick
from workers.state import StateEntry


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever leaves have the time that it takes on a busy machine."""
    monkeypatch.setattr(writing, "FINAL_S_MAX", 60.0)
    monkeypatch.setattr(final, "_EXPECTED_S_MAX", 60.0)


def held(buffer: int, step: int, *, attempt: int = 2) -> Held:
    return held_of(step, attempt=attempt, data_bytes=8, record_bytes=8, buffer=buffer)


def agreed(fallback: Fallback, *, behind: bool = False, without_memory: bool = False) -> None:
    fallback.agree(is_behind=behind, is_without_memory=without_memory)


def test_what_all_ranks_have_and_what_is_newer_is_spared() -> None:
    """Whether the newest is complete on other ranks, the rank that leaves cannot know."""
    buffers = [held(0, 7), held(1, 5), held(2, 6)]
    for num_agreed, expected in ((0, None), (1, None), (2, 1), (3, 1)):
        fallback = Fallback(2, (1, 4))
        for number, step in enumerate((5, 6, 7)):
            fallback.take(step)
            agreed(fallback, behind=number >= num_agreed)
        assert fallback.buffer(buffers, pinned=None, lineage=((1, 0), (2, 4))) == expected


@pytest.mark.parametrize("pinned", [0, 1, 2, None])
def test_the_newest_common_version_is_left(pinned: int | None) -> None:
    """Another rank may have died with the newest one under way: the one before is what is left."""
    for order in itertools.permutations(range(3)):
        buffers = [held(buffer, 5 + place) for place, buffer in enumerate(order)]
        buffers.sort(key=lambda one: one.buffer)
        fallback = Fallback(2, (1, 4))
        for step in (5, 6):
            fallback.take(step)
            agreed(fallback)
        fallback.take(7)
        agreed(fallback, behind=True)
        chosen = fallback.buffer(buffers, pinned=pinned, lineage=((1, 0), (2, 4)))
        assert chosen is None or (chosen != pinned and buffers[chosen].step == 5)
        assert (chosen is None) == (pinned == order[0])


def test_none_comes_behind_a_first_one_that_is_perhaps_not_complete() -> None:
    """A keeper takes the first of an attempt's two versions for complete, and reaps by it."""
    buffers = [held(0, 4, attempt=1), held(1, 5), None]
    fallback = Fallback(2, (1, 4))
    fallback.take(5)
    agreed(fallback, behind=True)
    assert fallback.buffer(buffers, pinned=None, lineage=((1, 0), (2, 4))) is None
    agreed(fallback)
    assert fallback.buffer(buffers, pinned=None, lineage=((1, 0), (2, 4))) == 2


def test_what_a_rank_perhaps_failed_to_complete_is_never_taken_for_safe() -> None:
    """It has memory again two steps later, and says so; that it skipped a version it does not."""
    buffers = [held(0, 5), held(1, 6), held(2, 4, attempt=1)]
    fallback = Fallback(2, (1, 4))
    for step in (5, 6):
        fallback.take(step)
    agreed(fallback, without_memory=True)
    agreed(fallback)

    assert fallback.buffer(buffers, pinned=None, lineage=((1, 0), (2, 4))) is None


def test_before_its_first_snapshot_an_attempt_has_what_it_began_with() -> None:
    """That is the only version there is, perhaps; what it did not resume from is no loss."""
    buffers = [held(0, 4, attempt=1), held(1, 9, attempt=1), held(2, 3, attempt=1)]
    fallback = Fallback(2, (1, 4))

    assert fallback.buffer(buffers, pinned=None, lineage=((1, 0), (2, 4))) == 1
    assert fallback.buffer(buffers, pinned=1, lineage=((1, 0), (2, 4))) == 2
    assert Fallback(1, (0, 0)).buffer(
        [held(0, 1, attempt=1), None, None], pinned=None, lineage=()
    ) in (
        1,
        2,
    )


def test_a_snapshot_that_takes_long_is_not_begun() -> None:
    """The controller, which waits for the rank to leave, would kill it in the middle."""
    assert is_quick(100 << 20, None)
    assert not is_quick(100 << 20, 0.4)
    assert is_quick(100 << 30, 0.2)
    assert not is_quick(100 << 30, None)


@pytest.mark.usefixtures("patient")
def test_a_fenced_rank_leaves_its_state(rank: Rank, node: Node) -> None:
    """Whatever else it does after a fence is refused; until it has left, this is not."""
    entries = state()
    fallback = Fallback(1, (0, 0))
    rank.hold(5, entries)
    fallback.take(5)
    agreed(fallback)
    rank.fenced.set()

    assert rank.writer.take_final(captured(8, entries), fallback)
    assert node.steps() == [5, 8]
    found = loaded(node.arena(), entries)
    by_name = {(one.fqn, one.slot): one.tensor for one in entries}
    assert all(torch.equal(tensor, by_name[name]) for name, tensor in found.items())


@pytest.mark.usefixtures("patient")
def test_a_snapshot_that_the_fence_met_under_way_is_completed(rank: Rank, node: Node) -> None:
    """It is copied whole, and there is no buffer to spare for it a second time."""
    entries = state()
    assert rank.ready(entries)
    rank.may_tell.clear()
    assert rank.take(5, entries)
    rank.fenced.set()
    rank.may_tell.set()
    assert not rank.writer.wait(5)
    assert node.steps() == []

    assert rank.writer.take_final(captured(5, entries), Fallback(1, (0, 0)))
    assert node.steps() == [5]
    assert rank.writer.take_final(captured(5, entries), Fallback(1, (0, 0)))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("simulated", range(8), indirect=True)
def test_what_came_off_a_device_before_the_fence_is_completed(
    rank: Rank, node: Node, simulated: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may have changed since; what is completed is the copy, with its checksums."""
    monkeypatch.setattr(device, "BUCKET_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(form.BufferLayout, "copy", lambda *_: None)
    entries = state(num_rows=40_000)
    assert rank.ready(entries)
    before = {(one.fqn, one.slot): one.tensor.clone() for one in entries}
    rank.may_tell.clear()
    assert rank.take(5, entries)
    rank.writer.device_copy.hold_update()
    simulated.compute(lambda: [one.tensor.add_(1) for one in entries])
    rank.fenced.set()
    rank.may_tell.set()
    assert not rank.writer.wait(5)

    assert rank.writer.take_final(captured(5, entries), Fallback(1, (0, 0)))
    held = loaded(node.arena(), entries)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())


@dataclass
class _Clock:
    """Runs as ever, but can be put forward."""

    ahead_s: float = 0.0
    sleep = staticmethod(time.sleep)
    thread_time = staticmethod(time.thread_time)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def waiting(
    rank: Rank, node: Node, simulated: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> tuple[_Clock, list[StateEntry]]:
    """Have a snapshot after step 5 wait for passes, of which the step before had ten."""
    clock, entries = _Clock(), state(num_rows=40_000)
    for module in (device, writing):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(device, "BUCKET_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(form.BufferLayout, "copy", lambda *_: None)
    assert rank.ready(entries)
    rank.writer.device_copy.hold_update()
    for _ in range(10):
        rank.writer.device_copy.passed(ends=False)
    clock.ahead_s += 600
    rank.writer.device_copy.hold_update()
    assert rank.take(5, entries)
    assert eventually(lambda: simulated.history == ["copy"] * device.IN_FLIGHT_MAX)
    with Credits(node.directory, 1).one(20) as has_one:
        assert has_one, "none is held while waiting for a pass"
    return clock, entries


@pytest.mark.parametrize("simulated", [0], indirect=True)
@pytest.mark.usefixtures("patient")
def test_a_rank_leaves_its_state_however_long_the_last_one_waited_for_passes(
    rank: Rank, node: Node, waiting: tuple[_Clock, list[StateEntry]]
) -> None:
    """Half a step, which may be seconds, it kept to passes; who leaves waits for none."""
    (clock, entries), fallback = waiting, Fallback(1, (0, 0))
    clock.ahead_s += 600
    assert rank.writer.wait(5)
    fallback.take(5)
    agreed(fallback)

    assert rank.writer.take_final(captured(8, entries), fallback)
    assert node.steps() == [5, 8]


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("simulated", [0], indirect=True)
def test_a_worker_without_a_final_snapshot_waits_for_no_passes(rank: Rank, node: Node) -> None:
    """After the last step there is none, nor any pass; the next attempt would be held up."""
    assert rank.writer.close()
    assert node.steps() == [5]


def test_what_is_late_is_refused(rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has said that it left; the next attempt may have begun from an older version."""
    monkeypatch.setattr(writing, "FINAL_S_MAX", 0.05)
    entries = state()
    assert rank.ready(entries)
    rank.may_tell.clear()
    rank.fenced.set()
    assert not rank.writer.take_final(captured(8, entries), Fallback(1, (0, 0)))
    rank.may_tell.set()

    assert rank.writer.close()
    assert node.steps() == []


def test_without_memory_there_is_no_final_snapshot(rank: Rank, node: Node) -> None:
    """It would have to be got first, from a keeper that may not be there."""
    assert not rank.writer.take_final(captured(8, state()), Fallback(1, (0, 0)))
    assert node.table.arenas() == {}
