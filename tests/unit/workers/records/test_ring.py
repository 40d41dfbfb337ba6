"""The record ring as a reader in another process sees it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from workers.protocol import GroupState
from workers.records import ABORTED, FINISHED, RecordRing, RingReader, RingView
from workers.records.ring import NUM_GROUPS_MAX, NUM_RECORDS, is_ring, read_records, read_ring

WORLD = (0, 1, 2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.ring"


def test_a_collective_that_is_waited_for_shows_how_long(path: Path) -> None:
    """Entered, not finished, with the payload: what a verdict is made of."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    first, number = ring.enter(world, "all_gather", 64)
    ring.leave(world, first, number, FINISHED)
    second, _ = ring.enter(world, "all_reduce", 4096)
    ring.wait(world, second)
    entered_ns = read_records(path)[-1].enter_ns

    assert RingReader(path).look(now_ns=entered_ns + 2_500_000_000).groups == (
        GroupState(
            group="world",
            ranks=range(4),
            entered_seq=2,
            finished_seq=1,
            op="all_reduce",
            size_bytes=4096,
            waiting_s=2.5,
        ),
    )
    assert RingReader(path).look().attempt == 3


def test_one_started_ahead_is_not_waiting(path: Path) -> None:
    """FSDP prefetches while it computes; a rank stuck there must not look like a waiting one."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    ring.enter(ring.group("world", WORLD), "all_gather", 64)

    assert RingReader(path).look().groups[0].waiting_s == 0.0


def test_waiting_for_a_later_one_than_the_oldest(path: Path) -> None:
    """The number waited for is what others are compared with, not the oldest in flight."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    ring.enter(world, "all_gather", 64)
    later, _ = ring.enter(world, "reduce_scatter", 64)
    ring.wait(world, later)

    (state,) = RingReader(path).look().groups

    assert (state.entered_seq, state.finished_seq) == (2, 1)
    assert state.waiting_s > 0.0


def test_a_finished_one_settles_the_earlier_ones(path: Path) -> None:
    """A work that nobody waits for would otherwise look unfinished for ever."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    ring.enter(world, "all_gather", 64)
    later, number = ring.enter(world, "reduce_scatter", 64)
    ring.leave(world, later, number, FINISHED)

    assert RingReader(path).look().groups[0].finished_seq == 2
    assert ring.num_in_flight() == 0


def test_on_a_device_the_oldest_that_it_reached_is_waited_for(path: Path) -> None:
    """The host cannot see when a stream waits, so whatever the device has reached counts."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    first, number = ring.enter(world, "all_reduce", 64, on_device=True)
    second, _ = ring.enter(world, "all_gather", 32, on_device=True)
    assert RingReader(path).look().groups == ()

    ring.reach(world, first)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.op) == (1, 0, "all_reduce")
    assert state.waiting_s > 0

    ring.leave(world, first, number, FINISHED)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.waiting_s) == (1, 1, 0.0)

    ring.reach(world, second)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.op) == (2, 1, "all_gather")
    assert (state.size_bytes, state.waiting_s > 0) == (32, True)


def test_a_half_written_state_leaves_the_last_whole_one(path: Path) -> None:
    """A writer that was stopped in the middle of a store stays there for minutes."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    for _ in range(3):
        seq, number = ring.enter(world, "all_reduce", 64)
    before = RingReader(path).look().groups
    ring.leave(world, seq, number, FINISHED)
    # The fourth store is in the first copy: its head is new, its tail is not yet.
    with path.open("r+b") as file:
        file.seek(128)
        assert struct.unpack("<Q", file.read(8)) == (4,)
        file.seek(128 + 56)
        file.write(struct.pack("<Q", 2))

    assert RingReader(path).look().groups == before


_WRITER = """
import sys
from workers.records import FINISHED, RecordRing
ring = RecordRing(sys.argv[1], attempt=3, num_ranks=4)
world = ring.group("world", (0, 1, 2, 3))
size = 0
while True:
    size += 1
    seq, number = ring.enter(world, "all_reduce", size)
    assert seq == size
    ring.leave(world, seq, number, FINISHED)
    if size == 1:
        print(flush=True)
"""


def test_a_reader_never_sees_a_torn_state(path: Path) -> None:
    """Every state that is read has the size that was stored together with its number."""
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            found = [RingReader(path).look().groups for _ in range(5000)]
        finally:
            writer.kill()

    # A reader skips a group that changes at each of its looks.
    states = [state for groups in found for state in groups]
    assert all(state.size_bytes == state.entered_seq for state in states)
    assert states[-1].entered_seq > states[0].entered_seq


def test_leaving_hides_the_groups_and_a_new_attempt_replaces_them(path: Path) -> None:
    """A collective that an aborted attempt left in flight must not look like a hang of the next."""
    old = RecordRing(path, attempt=3, num_ranks=4)
    old.enter(old.group("world", WORLD), "all_reduce", 64)
    old.close()
    assert RingReader(path).look() == RingView(3, ())

    RecordRing(path, attempt=4, num_ranks=2)
    old.enter(0, "all_reduce", 64)

    assert RingReader(path).look() == RingView(4, ())


def test_no_file_and_a_foreign_file_have_no_groups(path: Path) -> None:
    """A keeper looks before the worker has formed anything."""
    assert RingReader(path).look() == RingView(0, ())
    path.write_bytes(b"")
    assert RingReader(path).look() == RingView(0, ())
    path.write_bytes(os.urandom(4096))
    assert RingReader(path).look() == RingView(0, ())


def test_open_reader_follows_the_path_from_file_to_file(path: Path) -> None:
    """A keeper that went on with the ring of an older attempt would see nobody in the new one."""
    reader = RingReader(path)
    seen = [reader.look(now_ns=0)]
    for data in (b"", os.urandom(4096)):
        path.write_bytes(data)
        seen.append(reader.look(now_ns=0))
    path.unlink()

    for attempt in (3, 4):
        ring = RecordRing(path, attempt=attempt, num_ranks=4)
        world = ring.group("world", WORLD)
        for _ in range(attempt):
            ring.enter(world, "all_reduce", 64)
        seen.append(reader.look(now_ns=0))
        assert seen[-1] == RingReader(path).look(now_ns=0)
    ring.enter(world, "all_reduce", 64)
    seen.append(reader.look(now_ns=0))
    path.unlink()
    seen.append(reader.look(now_ns=0))

    assert [view.attempt for view in seen] == [0, 0, 0, 3, 4, 4, 0]
    assert [sum(state.entered_seq for state in view.groups) for view in seen] == [
        0, 0, 0, 3, 4, 5, 0,
    ]  # fmt: skip


def test_records_are_the_last_ones_in_order(path: Path) -> None:
    """The ring is overwritten from its start; the oldest must not come back."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    first = ring.enter(world, "broadcast", 8)
    for _ in range(NUM_RECORDS):
        last = ring.enter(world, "all_reduce", 64, 2)
    # Overwritten meanwhile: its end must not be stored into its successor.
    ring.leave(world, *first, FINISHED)
    ring.leave(world, *last, ABORTED)

    records = read_records(path)

    assert [record.seq for record in records] == list(range(2, NUM_RECORDS + 2))
    assert {(record.op, record.size_bytes, record.dtype) for record in records} == {
        ("all_reduce", 64, 2)
    }
    assert [record.flags for record in records if record.flags] == [ABORTED]
    assert records[-1].exit_ns >= records[-1].enter_ns


def test_a_second_group_of_the_same_name_is_told_apart(path: Path) -> None:
    """The same mesh made twice; joined counts would never match the other ranks'."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    for _ in range(2):
        ring.enter(ring.group("tp[0,1]", (0, 1)), "all_reduce", 8)

    assert [state.group for state in RingReader(path).look().groups] == ["tp[0,1]", "tp[0,1]#2"]


def test_more_groups_than_fit_are_not_recorded_but_work(path: Path) -> None:
    """A record is no reason to stop training."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    for index in range(NUM_GROUPS_MAX + 2):
        group = ring.group(f"g{index}", (0, 1))
        seq, number = ring.enter(group, "all_reduce", 8)
        ring.wait(group, seq)
        ring.leave(group, seq, number, FINISHED)

    assert group == -1
    seen = RingReader(path).look()
    assert (len(seen.groups), seen.num_dropped) == (NUM_GROUPS_MAX, 2)


def test_a_name_that_is_cut_within_a_letter_is_read(path: Path) -> None:
    """A script names its groups as it likes; a reader that fails is the keeper of the node."""
    ring = RecordRing(path, attempt=1, num_ranks=4)
    ring.enter(ring.group("x" + "\u00e4" * 60, WORLD), "all_reduce", 4)

    (state,) = RingReader(path).look().groups

    assert state.group.startswith("x\u00e4\u00e4")


def test_a_ring_is_read_whole_afterwards(path: Path) -> None:
    """Also when its writer has left the attempt, for whoever asks what it was doing."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    assert read_ring(path).rank == -1
    ring.assign(2)
    world = ring.group("world", WORLD)
    seq, number = ring.enter(world, "all_reduce", 64)
    ring.leave(world, seq, number, FINISHED)
    while ring.group("more", WORLD) >= 0:
        pass
    ring.close()

    found = read_ring(path)

    assert is_ring(path)
    assert (found.attempt, found.rank, found.num_dropped) == (3, 2, 1)
    assert [found.groups[one.group].group for one in found.records] == ["world"]


def test_another_file_is_no_ring(path: Path) -> None:
    path.write_bytes(b"everything else" * 100)

    assert not is_ring(path)
    assert read_ring(path).records == ()
