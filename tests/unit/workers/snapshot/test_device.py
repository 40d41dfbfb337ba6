"""Copies off a device: what they hold, how many are under way, and what waits for them."""

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.ranks import until
from tests.support.simulated_device import WAIT_S_MAX, SimulatedDevice
from ucp_core.numerics import NO_SUMS
from workers.memory import PATIENCE_S, Arena, Checksums, Credits
from workers.snapshot import buckets as buckets_module
from workers.snapshot import device as device_module
from workers.snapshot.buckets import TensorRange, into_buckets
from workers.snapshot.device import IN_FLIGHT_MAX, DeviceCopy, Leaving

BLOCK_BYTES = 64
BUCKET_BYTES = 256
SEEDS = range(20)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(device_module, "_TURN_BYTES", 3 * BUCKET_BYTES)
    monkeypatch.setattr(device_module, "_TURN_BUCKETS_MIN", 3)
    monkeypatch.setattr(device_module, "_BUCKETS_MAX", 1000)
    monkeypatch.setattr(device_module, "_FEW_BUCKETS", 1000)


@contextmanager
def running(seed: int, *, computes_first: bool = False) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(seed, computes_first=computes_first)
    try:
        yield device
    finally:
        device.end()


def tensors() -> tuple[list[Tensor], list[Tensor], list[memoryview]]:
    """Return targets and sources, one of which does not lie side by side; memory of the targets."""
    sources = [
        torch.arange(400, dtype=torch.float32),
        torch.randn(20, 30).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(5, dtype=torch.float64),
    ]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    data = [_memory(target) for target in targets]
    return targets, sources, data


def _memory(target: Tensor) -> memoryview:
    array: Any = target.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def checksums(data: memoryview, block_bytes: int = BLOCK_BYTES) -> tuple[int, str]:
    blocks = [data[low : low + block_bytes] for low in range(0, len(data), block_bytes)]
    return crc32(data), ",".join(str(crc32(block)) for block in blocks)


@given(
    st.lists(st.integers(min_value=0, max_value=5000), max_size=12),
    st.integers(min_value=1, max_value=8),
)
def test_buckets_have_every_byte_once_in_order_and_cut_at_blocks(
    sizes: list[int], blocks_each: int
) -> None:
    """A block that two buckets shared would be checksummed before all of it is there."""
    bucket_bytes = blocks_each * BLOCK_BYTES
    buckets = into_buckets(sizes, bucket_bytes=bucket_bytes, block_bytes=BLOCK_BYTES)
    pieces = [piece for bucket in buckets for piece in bucket]
    assert all(sum(p.high - p.low for p in bucket) <= bucket_bytes for bucket in buckets)
    assert all(bucket for bucket in buckets)
    assert all(p.low % BLOCK_BYTES == 0 and p.low < p.high for p in pieces)
    for index, size in enumerate(sizes):
        mine = [p for p in pieces if p.tensor == index]
        edges = [0, *(p.high for p in mine)]
        assert [p.low for p in mine] == edges[:-1]
        assert edges[-1] == size
    assert [p.tensor for p in pieces] == sorted(p.tensor for p in pieces)


def test_small_tensors_share_a_bucket() -> None:
    """A bucket for each would ask the device as often as there are tensors."""
    assert into_buckets([64, 10, 100], bucket_bytes=256, block_bytes=64) == [
        (TensorRange(0, 0, 64), TensorRange(1, 0, 10), TensorRange(2, 0, 100))
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_has_the_state_of_its_time_whatever_the_device_does_first(
    seed: int, tmp_path: Path
) -> None:
    """Updates are asked for while it is under way, and those before it may not be done yet."""
    targets, sources, data = tensors()
    with running(seed) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        for _ in range(3):
            device.compute(lambda: [source.add_(1) for source in sources])
            updated = device.compute(lambda: None)
            copy.begin(targets, sources, num_checked=3)
            with ThreadPoolExecutor(1) as other:
                checked = other.submit(copy.run, data[:3])
                updated.wait()
                expected = [source.clone() for source in sources]
                copy.hold_update()
                device.compute(lambda: [source.mul_(-3) for source in sources])
                assert checked.result(WAIT_S_MAX) == [checksums(view) for view in data[:3]]
            assert all(map(torch.equal, targets, expected))


@settings(deadline=None)
@given(seed=st.integers(min_value=0, max_value=2**32))
def test_few_are_under_way_until_an_update_comes(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever else wants the bus waits behind all that are."""
    targets, sources, data = tensors()
    with running(seed) as device:
        copy = DeviceCopy(Credits(tmp_path_factory.getbasetemp(), 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        copy.run(data)
        assert device.num_copies_max <= IN_FLIGHT_MAX
        assert all(map(torch.equal, targets, sources))
        assert device.bytes_copied == sum(map(len, data))


def test_the_next_bucket_waits_on_the_bus_however_large_buckets_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the bus waits between any two for an interpreter that training holds."""
    monkeypatch.setattr(device_module, "_TURN_BYTES", BUCKET_BYTES)
    targets, sources, data = tensors()
    with running(0, computes_first=True) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        copy.run(data)
        assert device.num_copies_max == IN_FLIGHT_MAX


def _has_gaps(device: SimulatedDevice, num: int) -> bool:
    return device.history.count("gap") == num


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_with_gaps_between_them_are_the_same_state(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is checksummed once it is there, which its last piece says; one cannot be divided.

    Settings that change the way may come between two snapshots.
    """
    monkeypatch.setattr(device_module, "BUCKET_BYTES", 4 * BUCKET_BYTES)
    monkeypatch.setattr(buckets_module, "PIECE_BYTES", BUCKET_BYTES)
    targets, sources, data = tensors()
    with running(seed) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        for in_pieces in (False, True, False, True):
            device.history.clear()
            copy.leaving = Leaving(pieces=in_pieces)
            before = copy.counts.num_pieces
            for source in sources:
                source.add_(1)
            copy.begin(targets, sources, num_checked=len(data))
            with ThreadPoolExecutor(1) as other:
                checked = other.submit(copy.run, data)
                expected = [source.clone() for source in sources]
                copy.hold_update()
                device.compute(lambda: [source.mul_(-3) for source in sources])
                assert checked.result(WAIT_S_MAX) == [checksums(view) for view in data]
            device.compute(lambda: None).wait()
            assert all(map(torch.equal, targets, expected))
            num_copies = copy.counts.num_pieces - before
            assert device.history.count("copy") == num_copies
            if in_pieces:
                assert num_copies > 4
                has_all = functools.partial(_has_gaps, device, num_copies)
                until(has_all, "the last gap", limit_s=WAIT_S_MAX)
                assert ("copy", "copy") not in pairwise(device.history)
            else:
                assert num_copies == 4
                assert "gap" not in device.history
    assert copy.counts.num_bytes == 4 * sum(map(len, data))


def _after_a_step_of(copy: DeviceCopy, seconds: float) -> None:
    copy._updated_s = time.monotonic() - seconds
    copy.hold_update()


def test_buckets_wait_while_the_device_is_within_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks again: the next collective may have begun while the last bucket was copied."""
    monkeypatch.setattr(device_module, "_FEW_BUCKETS", 1)
    targets, sources, data = tensors()
    looks = 0

    def is_within_collective() -> bool:
        nonlocal looks
        looks += 1
        return looks % 3 != 0

    with running(0) as device:
        copy = DeviceCopy(
            Credits(tmp_path, 1), BLOCK_BYTES, device, is_within_collective=is_within_collective
        )
        copy.leaving = Leaving(yields=True)
        _after_a_step_of(copy, 2 * WAIT_S_MAX)
        copy.begin(targets, sources, num_checked=len(data))
        assert copy.run(data) == [checksums(view) for view in data]

        assert device.num_copies_max == 1
        assert all(map(torch.equal, targets, sources))
    num_buckets = -(-sum(map(len, data)) // BUCKET_BYTES)
    assert copy.counts.num_yields >= num_buckets
    assert looks == 3 * copy.counts.num_yields
    assert copy.counts.yielding_s > 0.0


@pytest.mark.parametrize("ends_by", ["an update", "a caller", "a step's time"])
def test_a_collective_that_does_not_end_keeps_no_copy(ends_by: str, tmp_path: Path) -> None:
    """Its member is lost. The last snapshot is what the others go back to."""
    targets, sources, data = tensors()
    with running(0) as device:
        copy = DeviceCopy(
            Credits(tmp_path, 1), BLOCK_BYTES, device, is_within_collective=lambda: True
        )
        copy.leaving = Leaving(yields=True)
        _after_a_step_of(copy, 0.1 if ends_by == "a step's time" else 2 * WAIT_S_MAX)
        copy.begin(targets, sources, num_checked=len(data))
        with ThreadPoolExecutor(1) as other:
            checked = other.submit(copy.run, data)
            if ends_by == "an update":
                copy.hold_update()
            elif ends_by == "a caller":
                copy.hurry()
            assert checked.result(WAIT_S_MAX) == [checksums(view) for view in data]
    assert all(map(torch.equal, targets, sources))


def test_an_update_waits_for_a_copy_that_has_not_begun(tmp_path: Path) -> None:
    """The other thread may not have come to it, and every credit may be another rank's."""
    targets, sources, data = tensors()
    with running(0, computes_first=True) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        expected = [source.clone() for source in sources]
        copy.hold_update()
        device.compute(lambda: [source.zero_() for source in sources]).wait()
        assert copy.run(data) == [checksums(view) for view in data]
        assert all(map(torch.equal, targets, expected))


def test_a_copy_does_not_wait_for_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longer than a copy, and what has not left by the update holds the device up."""
    monkeypatch.setattr(device_module, "BUCKET_BYTES", 2 << 20)
    arena = Arena.create("w0001.0", body_bytes=16 << 20)
    sums = Checksums()
    sums.attach(arena)
    assert sums._process is not None
    source = torch.randint(256, (12 << 20,), dtype=torch.uint8)
    memory = arena.body(0)[: len(source)]
    target = torch.frombuffer(memory, dtype=torch.uint8)
    with running(0) as device, ThreadPoolExecutor(1) as other:
        copy = DeviceCopy(Credits(tmp_path, 1), 64 << 10, device, checksums=sums)
        os.kill(sums._process.pid, signal.SIGSTOP)
        copy.begin([target], [source], num_checked=1)
        checked = other.submit(copy.run, [memory])
        until(lambda: device.bytes_copied == len(source), "copied")
        os.kill(sums._process.pid, signal.SIGCONT)
        assert checked.result(WAIT_S_MAX) == [checksums(memory, 64 << 10)]
    sums.detach(arena)


def test_a_copy_that_is_ended_leaves_nothing_under_way(tmp_path: Path) -> None:
    """The memory is let go of after that."""
    targets, sources, data = tensors()
    with running(0) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        assert copy.end(WAIT_S_MAX)
        assert device.bytes_copied == 0
        with pytest.raises(RuntimeError, match="stopped before it was complete"):
            copy.run(data)
        assert device.bytes_copied == 0


def test_a_device_that_is_stuck_is_not_waited_for(tmp_path: Path) -> None:
    """A rank that leaves an attempt would never come to the next one."""
    targets, sources, data = tensors()
    goes_on = threading.Event()
    with running(0) as device:
        device.compute(lambda: goes_on.wait(WAIT_S_MAX))
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        copy.hold_update()
        assert not copy.end(0.05)
        goes_on.set()
        assert copy.end(WAIT_S_MAX)


def test_what_is_in_this_machines_memory_is_copied_at_once(tmp_path: Path) -> None:
    """Nothing puts an update off there."""
    targets, sources, data = tensors()
    copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES)
    copy.begin(targets, sources, num_checked=len(data))
    assert all(map(torch.equal, targets, sources))
    assert copy.run(data) == [checksums(view) for view in data]


def test_what_was_copied_already_is_checksummed_beside_what_is_on_a_device(tmp_path: Path) -> None:
    """The optimizer's part of a state may be kept off the device, and a peer's share not."""
    targets, sources, _ = tensors()
    other = memoryview(bytes(range(256)) * 3)
    with running(0) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=0)
        assert copy.run([other]) == [checksums(other)]
        assert all(map(torch.equal, targets, sources))


def test_a_tensor_that_gets_other_memory_or_another_place_is_copied_from_there(
    tmp_path: Path,
) -> None:
    """Slices are kept from copy to copy."""
    buffers = [tensors() for _ in range(2)]
    sources = buffers[0][1]
    with running(0) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        for number, (targets, _, data) in enumerate(buffers * 3):
            if number == 3:
                sources[1].data = sources[1] + 1
            if number == 4:
                sources = [source + 1 for source in sources]
            copy.begin(targets, sources, num_checked=len(data))
            assert copy.run(data) == [checksums(view) for view in data]
            assert all(map(torch.equal, targets, sources))


def test_checksums_that_are_known_are_not_made_again(tmp_path: Path) -> None:
    """Small tensors were checksummed as they were copied; who comes again, comes with the same."""
    data = [memoryview(bytes([number]) * size) for number, size in enumerate((5, 0, 700, 9))]
    known = [(1234, "1234"), NO_SUMS, NO_SUMS, (5678, "5678")]
    copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES)
    copy.begin([], [], num_checked=0)
    for _ in range(2):
        found = [known[0], NO_SUMS, checksums(data[2]), known[3]]
        assert copy.run(data, known=known) == found


def test_a_returning_owner_gets_the_checksums_again(tmp_path: Path) -> None:
    """A fence kept what was copied from being completed; the final snapshot completes it."""
    targets, sources, data = tensors()
    with running(0) as device:
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        first = copy.run(data)
        assert copy.run(data) == first == [checksums(view) for view in data]


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_copy_that_failed_is_never_taken_for_whole(fails_at: int, tmp_path: Path) -> None:
    """A parity of tensors that are not side by side takes device memory; training goes on without
    it."""
    targets, sources, data = tensors()
    with running(0) as device:
        device.fails_at = fails_at
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device)
        copy.begin(targets, sources, num_checked=len(data))
        copy.hold_update()
        device.compute(lambda: None).wait()
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                copy.run(data)
            with pytest.raises(torch.OutOfMemoryError):
                copy.wait()
        device.fails_at = 0
        copy.begin(targets, sources, num_checked=len(data))
        assert copy.run(data) == [checksums(view) for view in data]


@pytest.mark.parametrize("where", ["here", "device"])
def test_the_wait_for_a_credit_is_bounded(where: str, tmp_path: Path) -> None:
    """Another rank of the node has it, for as long as this one waits and longer."""
    targets, sources, data = tensors()
    with running(0) as device, Credits(tmp_path, 1).one() as has_one:
        assert has_one
        copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES, device if where == "device" else None)
        begun_s = time.monotonic()
        copy.begin(targets, sources, num_checked=len(data))
        assert copy.run(data) == [checksums(view) for view in data]
        assert time.monotonic() - begun_s >= PATIENCE_S


def test_a_single_bucket_needs_no_credit(tmp_path: Path) -> None:
    """It takes less time than to wait for others."""
    data = memoryview(bytes(BUCKET_BYTES))
    copy = DeviceCopy(Credits(tmp_path, 1), BLOCK_BYTES)
    copy.begin([], [], num_checked=0)
    assert copy.run([data]) == [checksums(data)]
    assert not (tmp_path / "credits").exists()
    assert len(copy.run([data, data])) == 2
    assert (tmp_path / "credits").exists()
