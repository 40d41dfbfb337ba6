"""An attempt's records of collectives on a device, which the host calls far ahead.

The device is simulated: a test says where it is.
"""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_work import DeviceWork
from workers.collectives import AbortedError, CollectiveError, nccl
from workers.collectives.attempt import Attempt
from workers.collectives.work import Call, StreamWork
from workers.protocol import GroupState
from workers.telemetry import RingReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.ring"


@pytest.fixture
def attempt(path: Path) -> Iterator[Attempt]:
    found = Attempt(3, backend="gloo", world_size=2, timeout_s=60.0, ring_path=str(path))
    yield found
    found.leave()


def called(attempt: Attempt, group: int, op: str = "all_reduce") -> DeviceWork:
    """Call a collective on the simulated device."""
    device = DeviceWork()
    seq, number = attempt.ring.enter(group, op, 64, on_device=True)
    start: Any = device
    call = Call(attempt, group, "a group", op, number, seq, start)
    launched = StreamWork([call])
    attempt.note_launched(group, launched.in_flight)
    launched.begin(lambda: device)
    attempt.note_begun(group)
    return device


class Held:
    """An output of a collective."""


def waited(attempt: Attempt, group: int) -> weakref.ref[Held]:
    """Call a collective, wait for it as torch does for a synchronous one, and drop its output."""
    held = Held()
    device = DeviceWork(has_begun=True, outputs=held)
    seq, number = attempt.ring.enter(group, "all_gather", 64, on_device=True)
    launched = StreamWork(
        [Call(attempt, group, "a group", "all_gather", number, seq)], waits_at_once=True
    )
    attempt.note_launched(group, launched.in_flight)
    launched.begin(lambda: device)
    attempt.note_begun(group)
    launched.wait()
    return weakref.ref(held)


def state(path: Path, group: str) -> GroupState | None:
    """Return what a reader outside sees of ``group``."""
    return next((one for one in RingReader(path).look().groups if one.group == group), None)


def test_a_rank_enters_when_its_device_does(attempt: Attempt, path: Path) -> None:
    """Else a rank stuck in a kernel looks like one that waits for the others."""
    world = attempt.ring.group("world", (0, 1))
    first, second = called(attempt, world), called(attempt, world, "all_gather")
    attempt.look_at_devices()
    found = state(path, "world")
    assert found is not None
    assert (found.entered_seq, found.num_ahead, found.waiting_s) == (0, 2, 0.0)

    first.has_begun = True
    attempt.look_at_devices()

    found = state(path, "world")
    assert found is not None
    assert (found.entered_seq, found.finished_seq, found.op) == (1, 0, "all_reduce")
    assert (found.num_ahead, found.waiting_s > 0.0) == (1, True)

    first.has_ended = True
    attempt.look_at_devices()
    found = state(path, "world")
    assert found is not None
    assert (found.entered_seq, found.finished_seq, found.waiting_s) == (1, 1, 0.0)

    second.has_begun = True
    attempt.look_at_devices()
    found = state(path, "world")
    assert found is not None
    assert (found.entered_seq, found.finished_seq, found.op) == (2, 1, "all_gather")


def test_a_device_is_within_a_collective_from_its_start_to_its_end(attempt: Attempt) -> None:
    """Copies wait in this time, whichever group the collective belongs to."""
    tp, dp = attempt.ring.group("tp", (0, 1)), attempt.ring.group("dp", (0, 1))
    first, second = called(attempt, tp), called(attempt, dp)
    assert not attempt.is_within_collective()

    second.has_begun = True
    assert attempt.is_within_collective()
    first.has_begun = second.has_ended = True
    assert attempt.is_within_collective()
    first.has_ended = True
    assert not attempt.is_within_collective()


def test_one_group_that_is_stuck_hides_no_other(attempt: Attempt, path: Path) -> None:
    """Exits were seen through one queue over all groups."""
    stuck, other = attempt.ring.group("tp", (0, 1)), attempt.ring.group("dp", (0, 1))
    called(attempt, stuck).has_begun = True
    one = called(attempt, other)
    one.has_begun = one.has_ended = True
    attempt.look_at_devices()

    found = state(path, "dp")
    assert found is not None
    assert (found.entered_seq, found.finished_seq) == (1, 1)


def test_a_failure_on_the_device_aborts_the_attempt(attempt: Attempt) -> None:
    """Only this rank can end the device's wait; and the rank then reports the failure."""
    world = attempt.ring.group("world", (0, 1))
    called(attempt, world).error = RuntimeError("NCCL remote error\nin detail")
    attempt.look_at_devices()

    assert attempt.aborted.is_set()
    error = attempt.error("; all_reduce was not started", "all_reduce")
    assert isinstance(error, CollectiveError)
    assert "NCCL remote error" in str(error)
    assert error.facts["group"] == "a group"


def test_a_device_that_fails_before_it_comes_to_a_collective_aborts_the_attempt(
    attempt: Attempt,
) -> None:
    """A wrong index in a forward pass fails whatever is asked of the device afterwards."""
    world = attempt.ring.group("world", (0, 1))
    called(attempt, world).broken = RuntimeError("CUDA error: device-side assert triggered")
    attempt.look_at_devices()

    assert attempt.aborted.is_set()
    assert "device-side assert" in str(attempt.error("", "all_reduce"))


def test_what_an_abort_ends_has_not_finished(attempt: Attempt, path: Path) -> None:
    """Its kernel ends by force, and its peers may never have called it."""
    world = attempt.ring.group("world", (0, 1))
    one = called(attempt, world)
    one.has_begun = True
    attempt.look_at_devices()
    attempt.abort()
    one.has_ended = True
    attempt.look_at_devices()

    found = state(path, "world")
    assert found is not None
    assert (found.entered_seq, found.finished_seq) == (1, 0)
    assert isinstance(attempt.error("", "all_reduce"), AbortedError)


class Stream:
    """The caller's stream: its marks, and whether the device has come to them."""

    def __init__(self) -> None:
        self.is_there = False

    def mark(self) -> Any:
        return self

    def is_reached(self) -> bool:
        return self.is_there


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(nccl, "Start", found.mark)
    return found


def test_a_collective_keeps_its_outputs_no_longer_than_the_caller_does(
    attempt: Attempt, path: Path, stream: Stream
) -> None:
    """The host is some forty layers ahead, and each gather of FSDP2 would stay allocated.

    The newest one of a group is kept: it words an error of the communicator.
    """
    world = attempt.ring.group("world", (0, 1))
    outputs = [waited(attempt, world) for _ in range(5)]
    gc.collect()

    assert [output() is not None for output in outputs] == [False] * 4 + [True]

    attempt.look_at_devices()
    assert attempt.ring.num_in_flight() == 5
    stream.is_there = True
    attempt._on_device[world][-1].inner.has_ended = True  # type: ignore[attr-defined]
    attempt.look_at_devices()

    found = state(path, "world")
    assert found is not None
    assert (found.finished_seq, attempt.ring.num_in_flight()) == (5, 0)


@pytest.mark.usefixtures("stream")
def test_an_error_is_worded_though_the_collective_that_meets_it_was_let_go_of(
    attempt: Attempt,
) -> None:
    """Its text names the address that cannot be reached; the group's own state has no text."""
    world = attempt.ring.group("world", (0, 1))
    for _ in range(3):
        waited(attempt, world)
    newest: Any = attempt._on_device[world][-1]
    newest.inner.error = RuntimeError("NCCL remote error: connection to 10.0.0.2 timed out")
    attempt.look_at_devices()

    assert attempt.aborted.is_set()
    error = attempt.error("", "all_gather")
    assert isinstance(error, CollectiveError)
    assert "all_gather number 1 of group a group failed" in str(error)
    assert "10.0.0.2" in str(error)


@pytest.mark.usefixtures("stream")
def test_an_error_is_seen_while_the_next_call_keeps_the_host(attempt: Attempt) -> None:
    """NCCL may have the host wait for the others in it, and its own work is not there yet."""
    world = attempt.ring.group("world", (0, 1))
    for _ in range(2):
        waited(attempt, world)
    last: Any = attempt._on_device[world][-1]
    seq, number = attempt.ring.enter(world, "all_gather", 64, on_device=True)
    waiting = StreamWork([Call(attempt, world, "a group", "all_gather", number, seq)])
    attempt.note_launched(world, waiting.in_flight)
    last.inner.error = RuntimeError("NCCL remote error")
    attempt.look_at_devices()

    assert attempt.aborted.is_set()


def test_a_collective_that_the_caller_waits_for_later_ends_when_it_ends(
    attempt: Attempt, path: Path
) -> None:
    """A mark behind the wait is behind the caller's own work, too: a healthy link looks slow.

    And torch keeps inputs for NCCL until any stream has waited: none may wait before the caller's.
    """
    world = attempt.ring.group("world", (0, 1))
    devices = [called(attempt, world) for _ in range(2)]
    for device in devices:
        device.has_begun = device.has_ended = True

    assert [device.num_waited for device in devices] == [0, 0]
    attempt.look_at_devices()
    found = state(path, "world")
    assert found is not None
    assert found.finished_seq == 2
