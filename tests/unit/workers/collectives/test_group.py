"""The recorded group over torch's own fake group, with tensors of a device that is not there."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.device_work import DeviceClock, DeviceWork
from tests.support.ranks import until
from workers.collectives import AbortedError, CollectiveError, connect_pairs, nccl
from workers.collectives.attempt import Attempt
from workers.collectives.device_spans import DeviceSpans
from workers.collectives.group import RecordedGroup, group_name
from workers.telemetry import RingReader, read_ring

WAIT_S_MAX = 60.0
NAME = "everstep_test_device"
#: Renamed in torch 2.12; the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reached:
    """A place that the device has come to."""

    def is_reached(self) -> bool:
        return True


class NcclHabits:
    """In place of torch's group with NCCL: what its calls return on a device since torch 2.8.

    A synchronous call returns no work, and no call does while calls are collected. An all-to-all
    without sizes of its splits fails, because the communicator does not block.
    """

    def __init__(self) -> None:
        self.collected: list[bool] | None = None
        self.error: Exception | None = None
        #: Set once the others are there: until then a call keeps the host.
        self.others: threading.Event | None = None

    def _start_coalescing(self, _: torch.device) -> None:
        self.collected = []

    def _end_coalescing(self, _: torch.device) -> DeviceWork | None:
        collected, self.collected = self.collected, None
        self._meet()
        return DeviceWork(has_ended=True) if any(collected or ()) else None

    def _meet(self) -> None:
        """Connect to the others, as the first call that needs other connections does."""
        if self.others is not None:
            assert self.others.wait(WAIT_S_MAX), "nothing ends the call"
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

    def __getattr__(self, name: str) -> Callable[..., DeviceWork | None]:
        assert hasattr(dist.ProcessGroup, name), f"torch's group has no {name}"

        def call(*args: Any) -> DeviceWork | None:
            if name in {"alltoall_base", "all_to_all_single"} and not (args[2] or args[3]):
                raise RuntimeError("NCCL Error 7: NCCL operation in progress")
            is_async = all(getattr(each, "asyncOp", True) for each in args)
            if self.collected is not None:
                self.collected.append(is_async)
                return None
            self._meet()
            return DeviceWork(has_ended=True, error=self.error) if is_async else None

        return call


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """An attempt of two ranks, whose world is a recorded group on a device."""
    monkeypatch.setattr(nccl, "Start", Reached)
    path = str(tmp_path / "w0.ring")
    found = Attempt(1, backend="gloo", world_size=2, timeout_s=60.0, ring_path=path)

    def create(_options: Any, _: Any) -> RecordedGroup:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        made: Any = FakeProcessGroup
        fake = made._create_internal(0, 2, made.Options())
        inner: Any = NcclHabits()
        group = RecordedGroup(found, inner, {"cuda": (kind, fake)}, ranks=(0, 1), rank=0)
        found.add(group)
        return group

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()
    found.leave()
    dist.Backend._plugins.pop(NAME.upper())


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def device(size: int = 2) -> Tensor:
    return torch.empty(size, device="cuda")


def broadcast() -> None:
    # torch's function of this name asks the device about itself.
    options = dist.BroadcastOptions()
    options.asyncOp = False
    world().broadcast([device()], options)


def coalesced() -> None:
    with dist._coalescing_manager(group=world(), device=torch.device("cuda")):
        dist.reduce(device(), 0)
        dist.reduce(device(), 0)


#: Every collective of torch that waits for its end, as scripts and torch itself call it.
SYNCHRONOUS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(device()),
    "broadcast": broadcast,
    "reduce": lambda: dist.reduce(device(), 0),
    "all_gather": lambda: dist.all_gather([device(), device()], device()),
    "all_gather_single": lambda: all_gather_single(device(4), device()),
    "gather": lambda: dist.gather(device(), [device(), device()], 0),
    "scatter": lambda: dist.scatter(device(), [device(), device()], 0),
    "reduce_scatter": lambda: dist.reduce_scatter(device(), [device(), device()]),
    "reduce_scatter_single": lambda: reduce_scatter_single(device(), device(4)),
    "all_to_all": lambda: dist.all_to_all([device(), device()], [device(), device()]),
    "all_to_all_single": lambda: dist.all_to_all_single(device(4), device(4)),
    "uneven": lambda: dist.all_to_all_single(device(4), device(4), [1, 3], [3, 1]),
    "barrier": dist.barrier,
    "coalesced": coalesced,
    "send": lambda: dist.send(device(), 1),
    "recv": lambda: dist.recv(device(), 1),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_synchronous_call_on_a_device_is_seen_to_its_end(attempt: Attempt, name: str) -> None:
    """torch returns no work for it, and without work nothing shows where the device is."""
    with FakeTensorMode():
        SYNCHRONOUS[name]()
    begun = attempt.ring.num_in_flight()

    attempt.look_at_devices()

    assert begun == (2 if name == "coalesced" else 1)
    assert attempt.ring.num_in_flight() == 0


@pytest.mark.parametrize(
    "name", sorted(set(SYNCHRONOUS) - {"broadcast", "coalesced", "send", "recv"})
)
def test_a_synchronous_call_lets_go_of_its_work(attempt: Attempt, name: str) -> None:
    """NCCL's work holds the outputs until the device has passed it, and a step has hundreds."""
    with FakeTensorMode():
        for _ in range(3):
            SYNCHRONOUS[name]()
    ((first, second, third),) = attempt._on_device.values()

    held = [one.inner is not None for one in (first, second, third)]  # type: ignore[attr-defined]

    assert held == [False, False, True]


def test_a_call_with_a_later_wait_keeps_its_work(attempt: Attempt) -> None:
    """A mark of such a wait is behind the caller's own work: only NCCL's work tells the end."""
    with FakeTensorMode():
        for _ in range(2):
            work = dist.all_reduce(device(), async_op=True)
            assert work is not None
            work.wait()
    ((first, second),) = attempt._on_device.values()

    assert [one.inner is not None for one in (first, second)] == [True, True]  # type: ignore[attr-defined]


def test_calls_of_a_graph_that_is_recorded_are_not_asked_about(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event of a graph cannot be queried, which passes for a failed device: an abort."""
    monkeypatch.setattr(nccl, "is_recording_graph", lambda: True)
    with FakeTensorMode():
        for call in SYNCHRONOUS.values():
            call()
        exchange()
    attempt.look_at_devices()

    assert attempt.ring.num_in_flight() == 0
    assert not attempt._on_device
    assert not attempt.aborted.is_set()


def test_functional_collectives_and_their_futures_are_seen_to_their_end(attempt: Attempt) -> None:
    """DTensor calls them; torch makes their calls in C++."""
    with FakeTensorMode():
        functional.all_reduce(device(), "sum", world())
        functional.all_to_all_single(device(4), None, None, world())
        work = dist.all_reduce(device(), async_op=True)
        work.get_future()

    attempt.look_at_devices()

    assert attempt.ring.num_in_flight() == 0


def test_a_pass_in_which_others_are_called_or_waited_for_is_not_timed(
    attempt: Attempt, tmp_path: Path
) -> None:
    """The device may have stood still in it, for another rank's sake."""
    clock = DeviceClock()
    attempt.device_spans = DeviceSpans(attempt.ring, mark=clock.mark)
    with FakeTensorMode():
        begun = dist.all_reduce(device(), async_op=True)
        assert begun is not None
        doings = [lambda: None, begun.wait, begun.synchronize, *SYNCHRONOUS.values()]
        for number, do in enumerate(doings):
            attempt.span("forward", step=1, micro_batch=number)
            do()
            clock.now_s += 0.5
            attempt.span("", step=1, micro_batch=number)
        attempt.span("optimizer", step=1, micro_batch=0)

    timed = [one for one in read_ring(tmp_path / "w0.ring").records if one.device_s]

    assert [(one.micro_batch, one.device_s) for one in timed] == [(0, 0.5)]


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter_single", "coalesced", "send"])
def test_a_host_that_waits_in_a_call_is_seen_to_wait(
    attempt: Attempt, name: str, tmp_path: Path
) -> None:
    """NCCL connects when a call needs it: the first one of its size or peer waits for a late rank.

    On four ranks of an H100 the wait was not seen, so no rank was named and nothing aborted it.
    """
    group: Any = world()
    others = group._inner.others = threading.Event()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with FakeTensorMode():
                SYNCHRONOUS[name]()
        except AbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: attempt.ring.num_in_flight() == (2 if name == "coalesced" else 1), "called")
    reader = RingReader(tmp_path / "w0.ring")

    def waits() -> bool:
        attempt.look_at_devices()
        return any(one.waiting_s > 0 and one.entered_seq for one in reader.look().groups)

    until(waits, "the wait is seen")
    attempt.aborted.set()
    others.set()
    thread.join(WAIT_S_MAX)

    assert len(errors) == 1
    attempt.look_at_devices()
    assert not any(attempt._on_device.values())


def test_an_abort_ends_the_connecting_of_pairs(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 a first receive from a dead rank was not ended by an abort within 30 s."""
    monkeypatch.setattr(nccl, "abort_together", lambda _: None)
    group: Any = world()
    group._inner.others = threading.Event()
    threading.Timer(0.1, attempt.abort).start()

    with FakeTensorMode(), pytest.raises(AbortedError, match="connecting the pairs of ranks"):
        connect_pairs(world())

    group._inner.others.set()


def test_pairs_are_connected_once_all_members_have_come(attempt: Attempt) -> None:
    """torch fails at an all-to-all without sizes of its splits."""
    with FakeTensorMode():
        connect_pairs(world())

    assert not attempt.aborted.is_set()


def test_an_error_on_the_device_is_reported_and_ends_the_attempt(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host calls nothing that would raise it: it waits for the device, for ever."""
    monkeypatch.setattr(nccl, "abort_together", lambda _: None)
    group: Any = world()
    group._inner.error = RuntimeError("remote error")
    with FakeTensorMode():
        work = dist.all_reduce(device(), async_op=True)
    assert work is not None

    attempt.look_at_devices()

    assert attempt.aborted.is_set()
    assert not work.is_success()
    with pytest.raises(CollectiveError, match=r"all_reduce number 1 of group world.*remote error"):
        work.wait()


def exchange() -> list[dist.Work]:
    """Send to rank 1 and receive from it, as the middle of a pipeline does."""
    with FakeTensorMode():
        there, back = torch.empty(3, device="cuda"), torch.empty(3, device="cuda")
        sends = dist.P2POp(dist.isend, there, 1)
        return dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, back, 1)])


def test_groups_of_one_name_are_numbered_as_they_were_made(
    attempt: Attempt, tmp_path: Path
) -> None:
    """Ranks may call them in another order; then each would take one group for the other."""
    made = []
    fake: Any = FakeProcessGroup
    inner: Any = NcclHabits()
    for _ in range(2):
        backend = fake._create_internal(0, 2, fake.Options())
        backends = {"cpu": (dist.ProcessGroup.BackendType.CUSTOM, backend)}
        made.append(RecordedGroup(attempt, inner, backends, ranks=(0, 1), rank=0))
        attempt.add(made[-1])
    for group in reversed(made):
        group.allreduce([torch.zeros(1)])

    names = [state.group for state in RingReader(tmp_path / "w0.ring").look().groups]

    assert names == ["[0,1]#2", "[0,1]"]
    many = tuple(range(10)), (*range(8), 9, 8), (*range(7), 8, 7, 9)
    assert len({group_name("x", ranks, 16) for ranks in many}) == 3
    assert group_name("x", many[0], 16) == "x[0..9 of 10]"


def test_an_exchange_on_a_device_is_one_call(attempt: Attempt) -> None:
    """Two calls, each behind the other in a stream, wait for ever if the peer's are in this order.

    torch coalesces only for groups of its own class.
    """
    works = exchange()

    assert len(works) == 1
    assert attempt.ring.num_in_flight() == 2


def test_an_exchange_that_fails_leaves_no_coalescing_open(attempt: Attempt) -> None:
    """Later calls of the thread, in later attempts too, would be collected and never made."""
    attempt.abort()
    with pytest.raises(AbortedError):
        exchange()
    group = dist.group.WORLD
    assert isinstance(group, RecordedGroup)

    assert group._coalesced is None


def test_pipelines_of_torch_use_it() -> None:
    """They call it by its module; a script may have imported the name before a group exists."""
    from torch.distributed import batch_isend_irecv, distributed_c10d

    assert batch_isend_irecv is dist.batch_isend_irecv is distributed_c10d.batch_isend_irecv
    assert batch_isend_irecv.__module__.startswith("workers.")


class Later:
    """A place that the device comes to once ``is_there`` says so."""

    def __init__(self) -> None:
        self.is_there = False

    def is_reached(self) -> bool:
        return self.is_there


def test_a_host_that_is_as_far_ahead_as_it_may_be_waits_until_an_abort(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may never come there: its peer is dead, and only an abort tells the host."""
    starts: list[Later] = []

    def start() -> Later:
        starts.append(Later())
        return starts[-1]

    monkeypatch.setattr(nccl, "Start", start)
    attempt.ahead_max = 2
    num_called = 0

    def call() -> None:
        nonlocal num_called
        with FakeTensorMode():
            for _ in range(9):
                dist.all_reduce(device(), async_op=True)
                num_called += 1

    with ThreadPoolExecutor(1) as other:
        calling = other.submit(call)
        until(lambda: num_called >= 2, "two calls")
        starts[0].is_there = True
        until(lambda: num_called >= 3, "a third call")
        attempt.abort()
        with pytest.raises(AbortedError, match="all_reduce was not started"):
            calling.result(WAIT_S_MAX)
    assert num_called == len(starts) == 3
