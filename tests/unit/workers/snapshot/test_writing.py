"""Snapshots of one rank: what is captured is what is held, and problem is never a failure."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.simulated_device import SimulatedDevice, Task
from tests.support.snapshot_rank import Node, Rank, captured, loaded, state
from tests.support.snapshots import eventually
from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import Box
from workers.keeper import descriptor_server
from workers.memory import HandOver, descriptor_socket, notify
from workers.memory import worker_memory as memory_module
from workers.snapshot import SnapshotMemory, writing
from workers.snapshot import buffer_layout as form
from workers.snapshot.writing import BLOCK_BYTES
from workers.state import StateEntry


@pytest.mark.parametrize("num_rows", [40, 40_000, 500_000])
def test_what_was_captured_is_held_although_training_goes_on(
    rank: Rank, node: Node, num_rows: int
) -> None:
    """The copy is taken now; the record comes when it comes, and checksums of large tensors do."""
    entries = state(num_rows=num_rows)
    assert rank.ready(entries)
    rank.may_tell.clear()
    before = {(one.fqn, one.slot): one.tensor.clone() for one in entries}
    assert rank.take(5, entries)
    for entry in entries:
        entry.tensor.add_(1)
    assert rank.writer.is_behind()
    assert node.steps() == []
    rank.may_tell.set()

    assert rank.writer.wait(5)
    held = loaded(node.arena(), entries)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    # Whether a process made the checksums.
    assert bool(rank.memory.checksums._attached) == (num_rows == 500_000)


def test_nothing_is_completed_after_the_fence(rank: Rank, node: Node) -> None:
    """The next attempt may have begun from the version before it."""
    entries = state()
    assert rank.ready(entries)
    rank.may_tell.clear()
    assert rank.take(1, entries)
    rank.fenced.set()
    rank.may_tell.set()

    assert not rank.writer.wait(1)
    assert rank.writer.close()
    assert node.steps() == []


def test_a_pinned_version_is_whole_when_it_is_found_pinned(rank: Rank, node: Node) -> None:
    """The keeper begins to store it at once; and it stays while others are taken."""
    entries = state()
    assert rank.ready(entries)
    rank.may_tell.clear()
    assert rank.take(1, entries, pin=True)
    assert not rank.writer.is_pinned()
    rank.may_tell.set()
    assert rank.writer.wait(1)
    assert rank.writer.is_pinned()
    for step in (2, 3, 4):
        assert rank.take(step, entries)
        assert rank.writer.wait(step)

    assert node.steps() == [1, 3, 4]
    node.arena().unpin(node.arena().versions()[0].buffer)
    assert not rank.writer.is_pinned()


def test_the_next_attempt_goes_on_in_the_same_memory(rank: Rank, node: Node) -> None:
    """The version that it resumes from is there, and is spared until there is a newer one."""
    entries = rank.hold(1, state())
    rank.writer.close()
    after = Rank(rank.memory, attempt=2)
    assert after.ready(entries)
    assert after.take(2, entries)

    assert after.writer.wait(2)
    assert node.steps() == [1, 2]
    assert after.writer.close()


def test_a_larger_part_gets_other_memory_and_leaves_the_old_alone(rank: Rank, node: Node) -> None:
    """After a loss every survivor has more to hold; what it resumes from is in the old arena."""
    rank.hold(1, state())
    rank.writer.close()
    more = state(num_rows=40_000)
    after = Rank(rank.memory, attempt=2)
    assert after.ready(more)
    assert after.take(2, more)

    assert after.writer.wait(2)
    held = {name: [one.step for one in found] for name, found in node.table.versions().items()}
    assert held == {"w0001.1": [1], "w0001.2": [2]}
    assert after.writer.close()


def test_tensors_that_came_later_are_not_captured_before_there_is_room(
    rank: Rank, node: Node
) -> None:
    """An optimizer may make its state late; a snapshot without it would load as if whole."""
    entries = state()
    assert rank.ready(entries)
    more = [*entries, *state()[:1]]
    more[-1] = StateEntry(
        fqn="late", slot="weight", shape=(9,), box=Box.full((9,)), tensor=torch.ones(9)
    )
    assert not rank.take(1, more)
    assert rank.ready(more)
    assert rank.take(2, more)

    assert rank.writer.wait(2)
    # It may need a larger arena.
    arena = node.table.arenas()[rank.memory.name]
    assert ("late", "weight") in loaded(arena, more)


def test_tensors_in_the_place_of_others_are_captured(rank: Rank, node: Node) -> None:
    """Some optimizers make new state of the same form in every step."""
    assert rank.ready(state())
    entries = state()
    assert rank.take(1, entries)

    assert rank.writer.wait(1)
    before = {(one.fqn, one.slot): one.tensor for one in entries}
    held = loaded(node.arena(), entries)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())


def test_a_tensor_that_moved_is_captured_from_where_it_is(rank: Rank, node: Node) -> None:
    """``tensor.data = other`` keeps the tensor and changes its memory; the old bytes stay valid."""
    entries = rank.hold(1, state())
    entries[0].tensor.data = entries[0].tensor + 1
    assert rank.take(2, entries)

    assert rank.writer.wait(2)
    held = loaded(node.arena(), entries)
    assert torch.equal(held["a", "weight"], entries[0].tensor)


def test_tensors_that_are_not_contiguous_are_captured_too(rank: Rank, node: Node) -> None:
    """Their bytes are not those that a buffer has, so they take another way there."""
    entries = state()
    whole = torch.randn(3, 40)
    entries[0] = replace(entries[0], tensor=whole.T)
    assert rank.ready(entries)
    assert rank.take(1, entries)

    assert rank.writer.wait(1)
    entries[0] = replace(entries[0], tensor=torch.zeros(40, 3))
    assert torch.equal(loaded(node.arena(), entries)["a", "weight"], whole.T)


@pytest.mark.parametrize("where", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 99])
def test_what_changes_in_a_buffer_after_it_was_completed_is_noticed(
    rank: Rank, node: Node, where: int
) -> None:
    """In the first block of a tensor, in the last, and where two meet."""
    num_bytes = 2 * BLOCK_BYTES + 100
    box = Box.full((num_bytes // 4,))
    tensor = torch.randn(box.shape)
    entries = [StateEntry(fqn="a", slot="weight", shape=box.shape, box=box, tensor=tensor)]
    rank.hold(1, entries)
    buffer = node.arena().versions()[0].buffer
    node.arena().body(buffer)[where] ^= 1

    with pytest.raises(ChecksumMismatchError):
        loaded(node.arena(), entries)
    node.arena().body(buffer)[where] ^= 1
    assert torch.equal(loaded(node.arena(), entries)["a", "weight"], entries[0].tensor)


def test_refused_memory_breaks_the_writer_and_nothing_else(tmp_path: Path) -> None:
    """The ranks store by themselves then."""
    node = Node(tmp_path, budget_bytes=1000)
    rank = Rank(SnapshotMemory(node.directory, "w0001"))
    assert not rank.ready(state())
    assert rank.writer.is_broken
    assert not rank.take(1, state())
    assert rank.writer.held() is None
    assert rank.writer.close()
    node.close()


def test_memory_that_was_refused_is_had_once_there_is_some(tmp_path: Path) -> None:
    """An attempt can last for days; what was missing at its begin may be there a second later."""
    node = Node(tmp_path, budget_bytes=1000)
    rank = Rank(SnapshotMemory(node.directory, "w0001"))
    entries = state()
    assert not rank.ready(entries)
    node.restart(budget_bytes=64 << 20)

    assert eventually(lambda: not rank.writer.is_broken)
    rank.hold(1, entries)
    assert node.steps() == [1]
    assert rank.writer.close()
    node.close()


def test_a_restarted_keeper_is_handed_the_memory_with_the_next_snapshot(
    rank: Rank, node: Node
) -> None:
    """It has nothing else to go by: its own memory is gone."""
    entries = rank.hold(1, state())
    node.restart()
    assert node.table.arenas() == {}
    assert rank.take(2, entries)

    assert rank.writer.wait(2)
    assert node.steps() == [1, 2]


def test_a_notice_to_a_keeper_that_was_replaced_meanwhile_does_not_count(
    rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a notice of memory that it was never handed, and would never be handed."""
    rank.hold(1, state())

    def restarted_first(path: Path, name: str) -> bool:
        monkeypatch.undo()
        node.restart()
        return notify(path, name)

    monkeypatch.setattr(memory_module, "notify", restarted_first)
    assert not rank.memory.tell()
    assert node.table.arenas() == {}
    assert rank.memory.tell()
    assert node.steps() == [1]


def test_a_keeper_that_is_back_after_an_attempt_has_ended_is_handed_the_memory(
    rank: Rank, node: Node
) -> None:
    """It died with the attempt, and recovery waits for what only the workers have now."""
    rank.hold(1, state())
    node.close()
    assert rank.writer.close()
    assert not rank.memory.tell()
    hand_over = HandOver(rank.memory)
    node.start()

    assert eventually(lambda: bool(node.table.arenas()))
    assert node.steps() == [1]
    hand_over.end()


def test_a_keeper_that_is_half_back_is_not_taken_for_one_that_has_the_memory(
    rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes notices, but its descriptor socket is still its predecessor's."""
    rank.hold(1, state())
    node.close()
    told: list[bool] = []
    bind: Callable[[Path, socket.SocketKind], socket.socket] = descriptor_server.bind_socket

    def bound(path: Path, kind: socket.SocketKind) -> socket.socket:
        made = bind(path, kind)
        told.append(rank.memory.tell())
        return made

    monkeypatch.setattr(descriptor_server, "bind_socket", bound)
    node.start()
    assert told == [False, False]
    assert rank.memory.tell()
    assert node.steps() == [1]


def test_a_restarted_keeper_is_handed_the_memory_when_an_attempt_ends(
    rank: Rank, node: Node
) -> None:
    """The next one looks for its version at keepers, not at workers."""
    entries = state()
    assert not rank.memory.tell()
    rank.hold(1, entries)
    node.restart()

    assert rank.writer.close()
    assert rank.memory.tell()
    assert node.steps() == [1]


def test_a_restarted_keeper_gets_notices_while_a_dead_peer_holds_all_snapshots_back(
    rank: Rank, node: Node
) -> None:
    """A dead keeper wrote that a peer copies, and would not take it back."""
    rank.hold(1, state())
    node.arena().set_followed(True)
    assert rank.writer.is_behind()
    node.restart()

    assert eventually(lambda: not rank.writer.is_behind())
    assert node.steps() == [1]


def test_a_device_that_failed_does_not_keep_a_writer_from_closing(rank: Rank) -> None:
    """The error that ended the attempt would be lost, and reported as one of the snapshot."""

    class Failed(Task):
        def is_reached(self) -> bool:
            raise RuntimeError("device-side assert triggered")

    assert rank.ready(state())
    rank.writer.device_copy._last = Failed(lambda: None)
    assert rank.writer.close()


def test_a_keeper_is_away_from_when_it_is_missed_and_not_since_the_last_word(
    rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots may be minutes apart, and it is back in a second."""
    entries = rank.hold(1, state())
    monkeypatch.setattr(writing, "_KEEPER_S_MAX", 0.0)
    node.close()
    assert rank.take(2, entries)
    assert rank.writer.wait(2)
    assert not rank.writer.is_broken

    assert rank.take(3, entries)
    assert eventually(lambda: rank.writer.is_broken)
    node.start()


def test_a_restarted_keeper_is_handed_the_memory_though_no_snapshot_is_due(
    rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one is, in minutes perhaps, what is there would die with its worker."""
    rank.hold(1, state())
    monkeypatch.setattr(writing, "_KEEPER_LOOK_S", 0.0)
    rank.writer.look_after()
    assert not rank.writer.is_behind(), "the keeper has it"
    assert rank.memory.is_told()
    node.restart()
    assert node.table.arenas() == {}
    assert not rank.memory.is_told()

    rank.writer.look_after()
    assert rank.writer.wait(1)
    assert node.steps() == [1]


def test_what_was_captured_can_be_stored_from_where_it_lies(rank: Rank) -> None:
    """The last step goes to storage too; a second copy of it would take as much memory again."""
    entries = state()
    assert rank.ready(entries)
    assert rank.take(1, entries)
    held = rank.writer.held()

    assert held is not None
    by_name = {(one.fqn, one.slot): one for one in entries}
    assert len(held) == 6
    for tensor in held:
        entry = by_name[tensor.fqn, tensor.slot]
        assert bytes(tensor.data) == bytes(entry.local_tensor(entry.tensor).data)


@pytest.mark.parametrize("simulated", [0], indirect=True)
def test_what_could_not_be_copied_off_a_device_is_not_held(
    rank: Rank, simulated: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has no memory for it; the state is stored by other ways, and training goes on."""
    monkeypatch.setattr(form.BufferLayout, "copy", lambda *_: None)
    entries = state()
    assert rank.ready(entries)
    simulated.fails_at = 1
    assert rank.take(1, entries)
    assert rank.writer.held() is None
    assert not rank.writer.wait(1)


def test_a_rank_without_elements_has_a_version_without_data(rank: Rank, node: Node) -> None:
    """It is part of every version; other ranks have the bytes."""
    entries = state()[2:3]
    rank.hold(1, entries)
    (held,) = node.arena().versions()
    assert held.data_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_update_on_the_device_waits_for_the_copy_and_the_host_for_neither(
    rank: Rank, node: Node
) -> None:
    """The copy runs on a stream of its own; kernels behind it would change what it reads."""
    box = Box.full((64 << 20,))
    tensor = torch.ones(box.shape, device="cuda")
    entries = [StateEntry(fqn="a", slot="weight", shape=box.shape, box=box, tensor=tensor)]
    node.restart(budget_bytes=2 << 30)
    assert rank.ready(entries)
    for step in range(1, 4):
        assert rank.take(step, entries)
        rank.writer.device_copy.hold_update()
        tensor.add_(1)
        assert rank.writer.wait(step)
        assert loaded(node.arena(), entries)["a", "weight"].unique().tolist() == [step]


def test_close_does_not_wait_for_a_keeper_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped keeper would hold up the recovery of the whole run."""
    monkeypatch.setattr(writing, "_CLOSE_S_MAX", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(descriptor_socket(tmp_path)))
        listener.listen()
        rank = Rank(SnapshotMemory(tmp_path, "w0001"))
        rank.writer.prepare(captured(0, state()))
        guest, _ = listener.accept()

        assert not rank.writer.close()
        guest.close()
