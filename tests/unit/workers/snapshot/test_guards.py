"""A rank that saves the share of a replica on another node beside its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.snapshot_rank import Node, Rank, captured, state
from tests.support.snapshots import eventually
from ucp_core.layout import ParallelLayout
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.memory import SnapshotMemory, descriptor_socket, guard_name, is_guard
from workers.snapshot import for_others
from workers.snapshot.buffer_layout import Captured
from workers.state import ReplicaShare, StateEntry, replicas_of
from workers.state.replica_shares import cut

LAYOUT = ParallelLayout(dp_replicate=3)
GUARD = guard_name(0, "w0000") + ".1"


def _replica(rank: int) -> list[list[StateEntry]]:
    """Return the shares of a state that is equal on all ranks, as ``rank`` cuts them."""
    torch.manual_seed(7)
    # Some parts have several blocks, most are less than one.
    entries = state(num_rows=60_000)
    parts = [(entry.box, entry.tensor.element_size()) for entry in entries]
    sharing = ReplicaShare.of(replicas_of(LAYOUT, rank), rank)
    return [
        [entries[number].rows(box) for number, box in share]
        for share in cut(parts, sharing.num_shares)
    ]


def _state(step: int, rank: int, guarded: Sequence[int] = ()) -> Captured:
    shares = _replica(rank)
    state = captured(step, shares[rank])
    return Captured(
        step=step,
        entries=state.entries,
        extra=state.extra,
        param_groups=state.param_groups,
        guarded=[(other, shares[other]) for other in guarded],
    )


def _begin(
    memory: SnapshotMemory, rank: int, guarded: tuple[int, ...] | None, attempt: int = 1
) -> Rank:
    made = Rank(memory, attempt=attempt, rank=rank, layout=LAYOUT, guards=guarded)
    made.writer.prepare(_state(0, rank, guarded or ()))
    assert eventually(lambda: made.writer.is_ready)
    return made


def _take(rank: Rank, step: int, kept_step: int = -1) -> None:
    assert rank.writer.capture(_state(step, rank.rank, rank.guards or ()), kept_step=kept_step)
    rank.writer.complete(pin=False)
    assert rank.writer.wait(step)


def _bytes(node: Node, name: str) -> bytes:
    """Return data and record of the newest version in an arena."""
    arena = node.table.arenas()[name]
    held = arena.versions()[-1]
    return bytes(arena.body(held.buffer)[: held.data_bytes + held.record_bytes])


def test_a_guarded_share_is_to_the_bit_what_its_own_rank_saves(tmp_path: Path, node: Node) -> None:
    """A loader takes whichever it reaches, and that of rank 0 has the small values of all."""
    (tmp_path / "far").mkdir()
    far = Node(tmp_path / "far")
    one = _begin(SnapshotMemory(node.directory, "w0001"), 1, (2, 0))
    others = [_begin(SnapshotMemory(far.directory, f"w000{rank}"), rank, ()) for rank in (0, 2)]
    for rank in (one, *others):
        _take(rank, 1)

    names = [f"w000{rank}.1" for rank in (0, 2)]
    copies = [f"{guard_name(number, 'w0001')}.1" for number in (1, 0)]
    assert [_bytes(node, name) for name in copies] == [_bytes(far, name) for name in names]
    held = {name: (one.rank, one.world_size) for name, (one,) in node.table.versions().items()}
    assert held == {"w0001.1": (1, 3), copies[0]: (0, 3), copies[1]: (2, 3)}
    assert all(rank.writer.close() for rank in (one, *others))
    far.close()


def test_a_wait_for_copies_ends_with_the_own_snapshot(node: Node) -> None:
    """No keeper will ever say that it has copied: every attempt would begin with a pause."""
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    _take(rank, 1)

    assert rank.writer.wait_copied(1, until_s=0.0)
    assert not rank.writer.wait_copied(2, until_s=0.0)
    assert rank.writer.close()


def test_memory_that_is_refused_for_a_guard_costs_no_own_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own one is worth as much as before; the copy follows once there is room."""
    monkeypatch.setattr(for_others, "_REFUSED_S", 0.0)
    node = Node(tmp_path, budget_bytes=4 << 20)
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    _take(rank, 1)
    assert not rank.writer.wait_copied(1, until_s=0.0)
    assert node.steps() == [1]

    node.restart(budget_bytes=64 << 20)
    _take(rank, 2)
    _take(rank, 3)
    held = {name: [one.step for one in held] for name, held in node.table.versions().items()}
    assert held.pop("w0000.1")[-1] == 3
    assert [(is_guard(name), steps) for name, steps in held.items()] == [(True, [3])]
    assert rank.writer.wait_copied(3, until_s=0.0)
    assert rank.writer.close()
    node.close()


def test_memory_that_was_refused_is_no_problem_once_it_is_not_wanted(tmp_path: Path) -> None:
    """The next attempt may be protected otherwise; people would look for memory all the same."""
    refused: dict[str, str] = {}
    table = ArenaTable(budget_bytes=4 << 20)
    door = DescriptorServer(descriptor_socket(tmp_path), table, refused.__setitem__)
    memory = SnapshotMemory(tmp_path, "w0000")
    assert _begin(memory, 0, (1,)).writer.close()
    assert "raise snapshot.node_memory_mib" in refused[guard_name(0, "w0000")]
    assert _begin(memory, 0, None, attempt=2).writer.close()
    assert set(refused.values()) == {""}
    door.close()


def test_what_all_ranks_have_stays_among_the_guarded_shares_too(node: Node) -> None:
    """The versions behind it may lack a rank that died; with the oldest all of it would go."""
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    for step in (1, 2, 3, 4):
        _take(rank, step, kept_step=1)

    held = {name: [one.step for one in held] for name, held in node.table.versions().items()}
    assert held == {GUARD: [1, 3, 4], "w0000.1": [1, 3, 4]}
    assert rank.writer.close()


def test_a_restarted_keeper_is_handed_the_guarded_share_too(node: Node) -> None:
    """No other node has it to give back, and no peer would copy it again."""
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    _take(rank, 1)
    node.restart()
    _take(rank, 2)

    held = {name: [one.step for one in held] for name, held in node.table.versions().items()}
    assert held == {GUARD: [1, 2], "w0000.1": [1, 2]}
    assert rank.writer.close()


def test_a_share_that_is_guarded_no_more_stays_until_what_is_newer_is_proven(node: Node) -> None:
    """The next attempt resumes from it, and only then is its memory of no use."""
    memory = SnapshotMemory(node.directory, "w0000")
    rank = _begin(memory, 0, (1,))
    _take(rank, 1)
    assert rank.writer.close()
    after = _begin(memory, 0, None, attempt=2)
    node.table.fence(2, [(1, 0), (2, 1)])

    _take(after, 2)
    assert node.table.reap(living=["w0000"], stored_step=0) == []
    _take(after, 3)
    assert node.table.reap(living=["w0000"], stored_step=0) == [GUARD]
    assert after.writer.close()


def test_a_guarded_share_is_kept_while_its_writer_lives(node: Node) -> None:
    """No peer lists it, as one does what a keeper copies; nor is it a worker's own."""
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    assert node.table.reap(living=["w0000"], stored_step=9) == []
    _take(rank, 1)
    assert node.table.reap(living=["w0000"], stored_step=9) == []
    assert node.table.reap(living=[], stored_step=0) == []
    assert sorted(node.table.reap(living=[], stored_step=9)) == sorted([GUARD, "w0000.1"])
    assert rank.writer.close()


def test_a_worker_that_takes_the_place_of_a_dead_one_is_given_both_memories(
    tmp_path: Path,
) -> None:
    """A node has no room for the shares of dead workers beside those of living ones."""
    dead: set[str] = set()
    node = Node(tmp_path, dead=lambda: dead)
    rank = _begin(SnapshotMemory(node.directory, "w0000"), 0, (1,))
    _take(rank, 1)
    assert rank.writer.close()
    dead.add("w0000")
    after = _begin(SnapshotMemory(node.directory, "w0009"), 0, (1,), attempt=2)

    assert sorted(node.table.versions()) == [f"{guard_name(0, 'w0009')}.1", "w0009.1"]
    assert all([one.step for one in held] == [1] for held in node.table.versions().values())
    assert after.writer.close()
    node.close()
