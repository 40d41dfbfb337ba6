"""The record ring as a reader in another process sees it."""

import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.protocol import Digest, GroupState
from workers.telemetry import (
    ABORTED,
    FINISHED,
    OP_CODES,
    RecordRing,
    RingReader,
    RingView,
    history_before,
    last_ring_path,
)
from workers.telemetry.ring_format import HEADER_BYTES, NUM_GROUPS_MAX, NUM_RECORDS, NUM_RECORDS_MAX
from workers.telemetry.ring_reader import is_ring, read_records, read_ring

WORLD = (0, 1, 2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.ring"


def test_a_collective_shows_how_long_the_rank_has_waited_for_it(path: Path) -> None:
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
            history=read_records(path)[-1].history,
            sent_bytes=3 * 64 + 2 * 4096 * 3 // 4,
        ),
    )
    assert RingReader(path).look().attempt == 3


@pytest.mark.parametrize(
    ("op", "sent_bytes"),
    [
        ("all_reduce", 150), ("reduce_scatter", 75), ("all_gather", 300), ("all_to_all", 75),
        ("broadcast", 100), ("send", 100), ("recv", 0), ("barrier", 100),
    ],
)  # fmt: skip
def test_what_a_rank_sends_is_summed_as_rings_do_it(path: Path, op: str, sent_bytes: int) -> None:
    """Over all calls: a reader looks now and then."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    for _ in range(3):
        ring.enter(world, op, 100)

    (state,) = RingReader(path).look().groups
    assert state.sent_bytes == 3 * sent_bytes


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
    """A work without a wait would otherwise look unfinished for ever."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    ring.enter(world, "all_gather", 64)
    later, number = ring.enter(world, "reduce_scatter", 64)
    ring.leave(world, later, number, FINISHED)

    assert RingReader(path).look().groups[0].finished_seq == 2
    assert ring.num_in_flight() == 0


def test_a_device_waits_for_the_oldest_collective_that_it_reached(path: Path) -> None:
    """The host cannot see when a stream waits, so whatever the device has reached counts."""
    ring = RecordRing(path, attempt=3, num_ranks=4)
    world = ring.group("world", WORLD)
    first, number = ring.enter(world, "all_reduce", 64, on_device=True)
    second, _ = ring.enter(world, "all_gather", 32, on_device=True)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.num_ahead, state.waiting_s) == (0, 2, 0.0)

    ring.reach(world, first)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.op) == (1, 0, "all_reduce")
    assert state.waiting_s > 0
    assert (state.num_ahead, state.dtype, state.history > 0) == (1, 0, True)

    ring.leave(world, first, number, FINISHED)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.waiting_s) == (1, 1, 0.0)

    ring.reach(world, second)
    (state,) = RingReader(path).look().groups
    assert (state.entered_seq, state.finished_seq, state.op) == (2, 1, "all_gather")
    assert (state.size_bytes, state.waiting_s > 0, state.num_ahead) == (32, True, 0)


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
        file.seek(HEADER_BYTES)
        assert struct.unpack("<Q", file.read(8)) == (4,)
        file.seek(HEADER_BYTES + 64)
        file.write(struct.pack("<Q", 2))

    assert RingReader(path).look().groups == before


_WRITER = """
import sys
from workers.telemetry import FINISHED, RecordRing
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
    """A keeper that went on with the ring of an older attempt would see none in the new one."""
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


def _history(path: Path, *calls: tuple[str, int, int]) -> int:
    """Return the hash after calls of (op, bytes, dtype)."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    group = ring.group("g", (0, 1))
    for call in calls:
        ring.enter(group, *call)
    (state,) = RingReader(path).look().groups
    assert (state.history, state.dtype) == (read_records(path)[-1].history, calls[-1][2])
    return state.history


def test_the_hash_of_calls_differs_with_each_call_that_members_must_make_alike(path: Path) -> None:
    """Sums of ranks that skipped a call of equal size are wrong, and nothing hangs."""
    usual = [("all_reduce", 64, 1), ("all_gather", 64, 1), ("all_reduce", 64, 1)]
    told = _history(path, *usual)

    assert _history(path, *usual) == told
    for other in (("all_reduce", 128, 1), ("all_reduce", 64, 2), ("broadcast", 64, 1)):
        assert _history(path, other, *usual[1:]) != told
    assert _history(path, *usual[1:], usual[0]) != told, "the order counts"
    # Payloads that may differ between members are no part of it.
    assert _history(path, usual[0], ("all_gather", 96, 1), usual[2]) == told
    assert _history(path, ("send", 64, 1)) == _history(path, ("recv", 64, 1))


def test_a_hash_tells_that_of_the_calls_before(path: Path) -> None:
    """Payloads from a megabyte on change the upper half of the word that is hashed."""
    for op, size_bytes in (("all_reduce", 64), ("all_reduce", 5 << 30), ("recv", 3 << 20)):
        before = _history(path, ("broadcast", 8, 1))
        after = _history(path, ("broadcast", 8, 1), (op, size_bytes, 2))

        assert history_before(after, OP_CODES[op], 2, size_bytes) == before


def test_a_span_does_not_count_what_its_rank_waited_for_others(path: Path) -> None:
    """A collective that was started ahead overlaps with computing: its own times say nothing."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    group = ring.group("g", (0, 1))
    early = ring.enter(group, "all_gather", 64)
    ring.span("forward", step=7, micro_batch=3)
    ring.leave(group, *early, FINISHED, 40_000_000)
    other = ring.enter(group, "all_gather", 64)
    elsewhere = threading.Thread(target=ring.leave, args=(group, *other, FINISHED, 50_000_000))
    elsewhere.start()
    elsewhere.join()
    ring.leave(-1, 0, -1, FINISHED, 2_000_000)  # of a group that did not fit
    ring.span("backward", step=7, micro_batch=3)
    late = ring.enter(group, "all_reduce", 64)
    ring.span("")
    ring.leave(group, *late, FINISHED, 1_000_000)

    rows = {(one.op, one.seq): one for one in read_ring(path).records}

    assert rows["forward", 0].blocked_s == 0.042
    assert rows["backward", 0].blocked_s == 0.0
    assert rows["all_gather", 1].blocked_s == 0.04
    assert rows["forward", 0].exit_ns == rows["backward", 0].enter_ns
    assert {(one.step, one.micro_batch) for key, one in rows.items() if key[1] != 1} == {(7, 3)}


def _step(ring: RecordRing, step: int, *passes: tuple[float, float, float]) -> None:
    """Record a step: of each pass seconds of data, forward and backward."""
    for number, seconds in enumerate(passes):
        for op, each_s in zip(("data", "forward", "backward"), seconds, strict=True):
            _span(ring, op, each_s, step=step, micro_batch=number)
    _span(ring, "optimizer", 0.0, step=step)


def _span(ring: RecordRing, op: str, own_s: float, *, step: int, micro_batch: int = 0) -> None:
    ring.span(op, step=step, micro_batch=micro_batch)
    time.sleep(own_s)
    ring.span("")


def _digest(reader: RingReader) -> Digest:
    reader.look()
    found = reader.digest(now_ns=time.monotonic_ns())
    assert found is not None
    return found


def test_a_digest_tells_the_fastest_micro_batch_of_each_step_once(path: Path) -> None:
    """Broken hardware slows all micro-batches, uneven work only some."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    reader = RingReader(path)
    reader.look()
    assert reader.digest(now_ns=0) is None
    _step(ring, 1, (0.0, 0.03, 0.03), (0.02, 0.01, 0.01))
    _span(ring, "forward", 0.01, step=2)
    _span(ring, "forward", 0.02, step=2)
    first = _digest(reader)
    # The rest of a step that was under way; a rank may have several stages.
    _span(ring, "backward", 0.01, step=2)
    _span(ring, "optimizer", 0.0, step=2)
    ring.span("data", step=3)
    second = _digest(reader)

    (one,), (two,) = first.costs, second.costs
    assert (one.step, two.step) == (1, 2)
    assert 0.02 <= one.compute_s < 0.06
    assert 0.01 <= one.data_s < 0.02
    assert 0.04 <= two.compute_s < 0.1
    assert (first.span, second.span) == ("", "data")
    assert 0.0 < second.span_s < 10.0
    assert _digest(reader).costs == ()


def test_a_cost_has_the_tokens_of_its_micro_batch(path: Path) -> None:
    """Those that were read for it, maybe long before: stages of a pipeline read them all first."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    for number, tokens in enumerate((4096, 1024, 0)):
        ring.span("data", step=1, micro_batch=number)
        ring.span("", tokens=tokens)
    for number, forward_s in enumerate((0.03, 0.001, 0.03)):
        ring.span("forward", step=1, micro_batch=number)
        time.sleep(forward_s)
        ring.span("backward", step=1, micro_batch=number)
    ring.span("optimizer", step=1)
    ring.span("")

    (cost,) = _digest(RingReader(path)).costs
    assert cost.tokens == 1024
    assert pickle.loads(pickle.dumps(Digest(costs=(cost,)))).costs[0].tokens == 1024


def test_a_step_of_which_records_are_lost_has_no_cost(path: Path) -> None:
    """The fastest of the micro-batches that are left may be half of one."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    reader = RingReader(path)
    group = ring.group("g", (0, 1))
    for step in (1, 2):
        ring.span("forward", step=step)
        for _ in range(NUM_RECORDS if step == 1 else 1):
            ring.enter(group, "all_gather", 64)
        ring.span("backward", step=step)
        ring.span("optimizer", step=step)
    ring.span("")

    assert [cost.step for cost in _digest(reader).costs] == [2]


def test_on_a_device_the_times_of_the_host_are_no_costs(path: Path) -> None:
    """The host has called a whole step before the device begins it."""
    ring = RecordRing(path, attempt=1, num_ranks=2)
    ring.assign(0, on_device=True)
    reader = RingReader(path)
    _step(ring, 1, (0.0, 0.0, 0.0))
    ring.span("data", step=2)

    found = _digest(reader)

    assert (found.costs, found.span) == ((), "data")
    ring.close()
    reader.look()
    assert reader.digest(now_ns=0) is None


def test_a_ring_is_as_large_as_60_s_need_and_the_one_before_is_kept(path: Path) -> None:
    """Two steps of a tensor-parallel run with many micro-batches fill the smallest one."""
    for attempt, num_records in ((1, NUM_RECORDS), (2, NUM_RECORDS_MAX), (3, NUM_RECORDS)):
        ring = RecordRing(path, attempt=attempt, num_ranks=2)
        group = ring.group("g", (0, 1))
        calls = num_records + 1 if attempt == 1 else 2
        for _ in range(calls):
            ring.enter(group, "all_reduce", 64)
            time.sleep(0.0 if attempt == 1 else 0.02)
        size_bytes = path.stat().st_size
        assert num_records * 64 < size_bytes < (num_records + NUM_RECORDS) * 64
        assert len(read_records(path)) == min(calls, num_records)

    assert (read_ring(path).attempt, read_ring(last_ring_path(path)).attempt) == (3, 2)
    assert sorted(each.name for each in path.parent.iterdir()) == ["w0.ring", "w0.ring.last"]


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
    assert (read_ring(path).rank, read_ring(path).place) == (-1, None)
    ring.assign(2)
    ring.locate((0, 1, 2), "a" * 56)
    world = ring.group("world", WORLD)
    seq, number = ring.enter(world, "all_reduce", 64)
    ring.leave(world, seq, number, FINISHED)
    while ring.group("more", WORLD) >= 0:
        pass
    ring.close()

    found = read_ring(path)

    assert is_ring(path)
    assert (found.attempt, found.rank, found.num_dropped) == (3, 2, 1)
    assert (found.place, found.node) == ((0, 1, 2), "a" * 56)
    assert [found.groups[one.group].group for one in found.records] == ["world"]


def test_another_file_is_no_ring(path: Path) -> None:
    path.write_bytes(b"everything else" * 100)

    assert not is_ring(path)
    assert read_ring(path).records == ()
