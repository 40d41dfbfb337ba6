"""Buckets that leave with the passes of a step: what tells of these, and what then may leave."""

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.simulated_device import WAIT_S_MAX, SimulatedDevice, Task
from tests.support.snapshots import eventually
from ucp_core.numerics import Sums, sums_of
from workers.memory import Credits
from workers.snapshot import device as device_module
from workers.snapshot import on_passes
from workers.snapshot.device import IN_FLIGHT_MAX, SPREAD, DeviceCopy

BUCKET_BYTES = 64
#: Longest wait for a pass: a missing one would not end a test.
STEP_S = 60.0


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(device_module, "_TURN_BYTES", 3 * BUCKET_BYTES)
    monkeypatch.setattr(device_module, "_TURN_BUCKETS_MIN", 3)
    monkeypatch.setattr(device_module, "_BUCKETS_MAX", 1000)
    monkeypatch.setattr(device_module, "_FEW_BUCKETS", 1000)


class _Block(nn.Module):
    """Returns what blocks return: a tensor, or several things."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._form = form

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        return {"tensor": y, "tuple": (None, y), "dict": {"n": 3, "y": y}}[self._form]


def _sum(model: list[nn.Module], form: str, x: Tensor) -> Tensor:
    for block in model:
        found = block(x)
        x = {"tensor": lambda f: f, "tuple": lambda f: f[1], "dict": lambda f: f["y"]}[form](found)
        # A function that a hook puts around a result does not allow that.
        x.mul_(2)
    return x.sum()


class _Notes(list[str]):
    """The reports, with their passes."""

    where = ""

    def __call__(self, *, ends: bool) -> None:
        self.append(f"{self.where} {'ends' if ends else 'begins'}")


#: Reports of three blocks.
STEP = ["forward begins", "forward ends"] * 3 + ["backward begins"] * 3 + ["backward ends"]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_each_block_tells_of_both_passes_and_computes_as_ever(form: str) -> None:
    """Three blocks, two micro-batches."""
    told = _Notes()
    torch.manual_seed(0)
    model: list[nn.Module] = [_Block(form) for _ in range(3)]
    x = torch.randn(2, 4)
    _sum(model, form, x).backward()
    expected = [parameter.grad for block in model for parameter in block.parameters()]
    for block in model:
        block.zero_grad()

    end = on_passes(model, told)
    for _ in range(2):
        told.where = "forward"
        loss = _sum(model, form, x)
        told.where = "backward"
        loss.backward()
    assert told == STEP * 2
    found = [parameter.grad for block in model for parameter in block.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, 2 * other)

    end()
    _sum(model, form, x).backward()
    assert told == STEP * 2


def test_an_evaluation_tells_of_nothing() -> None:
    """A step would seem to have more passes than it has."""
    told = _Notes()
    model: list[nn.Module] = [_Block("tensor")]
    on_passes(model, told)
    with torch.no_grad():
        _sum(model, "tensor", torch.ones(2, 4))
    assert not told


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_ends_no_pass(reentrant: bool) -> None:  # noqa: FBT001  a parameter
    """Activations are, where memory is short; the device goes on with the backward pass."""
    told = _Notes()
    block = _Block("tensor")
    on_passes([block], told)
    x = torch.ones(2, 4, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=reentrant).sum()
    told.where = "backward"
    loss.backward()
    found = [one for one in told if "backward" in one]
    assert found == ["backward begins", "backward begins", "backward ends"]


def test_a_compiled_block_tells_too() -> None:
    """Whatever it was compiled to, the device is asked for its passes."""
    told = _Notes()
    block = _Block("tensor")
    on_passes([block], told)
    compiled: Callable[[Tensor], Tensor] = torch.compile(block, backend="eager")
    compiled(torch.ones(2, 4)).sum().backward()
    assert told == [" begins", " ends", " begins", " ends"]


def _state(num_buckets: int) -> tuple[list[Tensor], list[Tensor], list[memoryview]]:
    sources = [torch.randn(num_buckets * BUCKET_BYTES // 4)]
    targets = [torch.zeros_like(sources[0])]
    array: Any = targets[0].view(torch.uint8).numpy()
    return targets, sources, [memoryview(array)]


def _checksums(data: memoryview) -> Sums:
    return sums_of(data, BUCKET_BYTES)


def _warm(copy: DeviceCopy, num_passes: int, step_s: float = STEP_S) -> None:
    """Have a step with so many passes be the one before."""
    with pytest.MonkeyPatch.context() as patch:
        for now_s in (0.0, step_s):
            patch.setattr(device_module, "time", SimpleNamespace(monotonic=lambda now=now_s: now))
            copy.hold_update()
            for _ in range(0 if now_s else num_passes):
                copy.passed(ends=False)


@settings(max_examples=2 * settings().max_examples)
@given(
    seed=st.integers(min_value=0, max_value=2**32),
    num_buckets=st.integers(min_value=1, max_value=40),
    num_passes=st.integers(min_value=1, max_value=20),
    before=st.integers(min_value=1, max_value=20),
)
def test_no_bucket_leaves_before_the_device_has_done_its_share_of_passes(
    seed: int,
    num_buckets: int,
    num_passes: int,
    before: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The processor has asked for all of them at once; and then for an update.

    Buckets that a step with fewer passes leaves over leave at the update.
    """
    targets, sources, data = _state(num_buckets)
    expected = sources[0].clone()
    device = SimulatedDevice(seed)

    def share(num_passed: int) -> int:
        num = math.ceil(num_buckets * num_passed / (before * SPREAD))
        return min(num_buckets, max(IN_FLIGHT_MAX, num))

    try:
        copy = DeviceCopy(Credits(tmp_path_factory.getbasetemp(), 1), BUCKET_BYTES, device)
        _warm(copy, before)
        with ThreadPoolExecutor(1) as other:
            copy.begin(targets, sources, num_checked=1)
            checked = other.submit(copy.run, data)
            for _ in range(num_passes):
                device.compute(lambda: device.history.append("pass"))
                copy.passed(ends=False)
            copy.hold_update()
            device.compute(sources[0].zero_)
            assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]
    finally:
        device.end()
    assert torch.equal(targets[0], expected)
    assert device.history.count("copy") == num_buckets
    for place, done in enumerate(device.history):
        if done == "copy":
            number = device.history[: place + 1].count("copy")
            num_passed = device.history[:place].count("pass")
            assert number <= share(num_passed) or number > share(num_passes)


def _begun(
    directory: Path, device: SimulatedDevice, num_passes: int, step_s: float = STEP_S
) -> tuple[DeviceCopy, list[memoryview], list[Tensor], list[Tensor]]:
    targets, sources, data = _state(20)
    copy = DeviceCopy(Credits(directory, 1), BUCKET_BYTES, device)
    _warm(copy, num_passes, step_s)
    copy.begin(targets, sources, num_checked=1)
    return copy, data, targets, sources


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(0)
    yield made
    made.end()


def test_a_model_that_tells_of_no_passes_is_not_waited_for(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """A script may compute without the modules it was given."""
    copy, data, targets, sources = _begun(tmp_path, device, 0)
    assert copy.run(data) == [_checksums(data[0])]
    assert torch.equal(targets[0], sources[0])


@pytest.mark.parametrize("who", ["hurry", "wait", "hold_update", "end"])
def test_a_wait_for_a_copy_is_no_wait_for_passes(
    who: str, tmp_path: Path, device: SimulatedDevice
) -> None:
    """The run is over, or a worker leaves: there are no more."""
    copy, data, targets, sources = _begun(tmp_path, device, 10)
    with ThreadPoolExecutor(1) as other:
        checked = other.submit(copy.run, data)
        assert eventually(lambda: device.history == ["copy"] * IN_FLIGHT_MAX)
        assert not checked.done()
        getattr(copy, who)(*((WAIT_S_MAX,) if who == "end" else ()))
        if who == "end":
            with pytest.raises(RuntimeError, match="stopped before it was complete"):
                checked.result(WAIT_S_MAX)
        else:
            assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]
            assert torch.equal(targets[0], sources[0])


def test_the_wait_for_a_training_that_does_something_else_is_bounded(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """It evaluates, say; until the snapshot is whole its node's loss costs a step more."""
    copy, data, targets, sources = _begun(tmp_path, device, 10, step_s=0.05)
    assert copy.run(data) == [_checksums(data[0])]
    assert torch.equal(targets[0], sources[0])


def test_no_credit_is_held_during_the_wait_for_a_pass(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """Other ranks of the node could use it."""
    copy, data, _, _ = _begun(tmp_path, device, 10)
    with ThreadPoolExecutor(1) as other:
        checked = other.submit(copy.run, data)
        assert eventually(lambda: device.history == ["copy"] * IN_FLIGHT_MAX)
        with Credits(tmp_path, 1).one(WAIT_S_MAX) as has_one:
            assert has_one
            assert not checked.done()
        copy.hurry()
        assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]


def test_no_credit_is_held_while_the_device_has_a_pass_to_do(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """The processor asked for it long ago."""
    copy, data, _, _ = _begun(tmp_path, device, 10)
    turns = [Task(lambda: None) for _ in range(2)]
    with ThreadPoolExecutor(1) as other:
        checked = other.submit(copy.run, data)
        assert eventually(lambda: device.num_asked == IN_FLIGHT_MAX)
        for turn in turns:
            device.hold(turn)
            copy.passed(ends=False)
        # Twenty buckets over half of ten passes: four behind each.
        for turn, num_before in zip(turns, (IN_FLIGHT_MAX, 4), strict=True):
            is_further = functools.partial(_has_asked_for_more, device, num_before)
            assert not eventually(is_further, within_s=0.1)
            with Credits(tmp_path, 1).one(0) as has_one:
                assert has_one
            turn.done.set()
            device.compute(lambda: None)
            assert eventually(is_further)
        copy.hurry()
        assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]


def _has_asked_for_more(device: SimulatedDevice, num_copies: int) -> bool:
    return device.num_asked > num_copies


@contextmanager
def _running(copy: DeviceCopy, data: list[memoryview]) -> Iterator[Future[list[Sums]]]:
    with ThreadPoolExecutor(1) as other:
        try:
            yield other.submit(copy.run, data)
        except BaseException:
            copy.end(WAIT_S_MAX)
            raise


def _pass_s(device: SimulatedDevice, seconds: float) -> None:
    device.compute(lambda: setattr(device, "now_s", device.now_s + seconds))


@pytest.mark.parametrize("place", [0, 4, 8])
def test_buckets_leave_where_the_device_waited_in_the_step_before(
    place: int, tmp_path: Path, device: SimulatedDevice
) -> None:
    """Ten marks, a minute from each to the next; but it waited only behind one of them.

    There a pass ended, and another began. Two more end within another, the second as that does.
    """
    copy = DeviceCopy(Credits(tmp_path, 1), BUCKET_BYTES, device)

    def tell(number: int) -> None:
        # The time after the beginning of a snapshot is also a wait.
        _pass_s(device, 0 if number == 4 or (place and number < 2) else 60)
        if number:
            copy.passed(ends=number in {2, 3, place})

    _warm(copy, 10)
    for step in range(2):
        targets, sources, data = _state(20)
        device.history.clear()
        copy.begin(targets, sources, num_checked=1)
        with _running(copy, data) as checked:
            for number in range(11):
                tell(number)
                if not step:
                    continue
                is_all = number >= place
                num = 20 if is_all else IN_FLIGHT_MAX
                assert eventually(functools.partial(_has_copied, device, num), within_s=10)
                assert is_all or not eventually(
                    functools.partial(_has_copied, device, num + 1), within_s=0.05
                )
            copy.hold_update()
            assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]
        assert torch.equal(targets[0], sources[0])
        device.compute(lambda: None).wait()


def _has_copied(device: SimulatedDevice, num: int) -> bool:
    return device.history.count("copy") >= num


def test_a_large_state_leaves_in_few_buckets_and_behind_few_marks(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the interpreter from training; the gaps are measured in the first two steps alone.

    Until passes are told there are no gaps to fill.
    """
    monkeypatch.setattr(device_module, "_BUCKETS_MAX", 4)
    monkeypatch.setattr(device_module, "_FEW_BUCKETS", 2)
    copy = DeviceCopy(Credits(tmp_path, 1), BUCKET_BYTES, device)
    nums = []
    for _ in range(3):
        targets, sources, data = _state(40)
        device.num_marks = device.num_asked = 0
        copy.begin(targets, sources, num_checked=1)
        with _running(copy, data) as checked:
            for _ in range(30):
                copy.passed(ends=False)
            copy.hold_update()
            assert checked.result(WAIT_S_MAX) == [_checksums(data[0])]
        assert torch.equal(targets[0], sources[0])
        device.compute(lambda: None).wait()
        nums.append((device.num_asked, device.num_marks > 4))
    assert nums == [(2, True), (4, True), (4, False)]


def test_a_bucket_has_its_bound_however_large_the_state(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks of the node wait for a bucket."""
    monkeypatch.setattr(device_module, "_FEW_BUCKETS", 2)
    monkeypatch.setattr(device_module, "_BUCKET_BYTES_MAX", 4 * BUCKET_BYTES)
    copy = DeviceCopy(Credits(tmp_path, 1), BUCKET_BYTES, device)
    targets, sources, data = _state(40)
    copy.begin(targets, sources, num_checked=1)
    assert copy.run(data) == [_checksums(data[0])]
    assert device.num_asked == 10


def test_waits_of_a_step_unlike_the_last_one_count_for_nothing(
    tmp_path: Path, device: SimulatedDevice
) -> None:
    """They are known by their place among so many passes."""
    copy = DeviceCopy(Credits(tmp_path, 1), BUCKET_BYTES, device)
    targets, sources, data = _state(20)
    copy.begin(targets, sources, num_checked=1)
    for _ in range(10):
        _pass_s(device, 60)
        copy.passed(ends=False)
    copy.hold_update()
    copy.run(data)
    device.compute(lambda: None).wait()

    # A step without a snapshot.
    _warm(copy, 4)
    device.history.clear()
    targets, sources, data = _state(20)
    copy.begin(targets, sources, num_checked=1)
    with _running(copy, data) as checked:
        for num in (IN_FLIGHT_MAX, 10, 20):
            assert eventually(functools.partial(_has_copied, device, num))
            further = functools.partial(_has_copied, device, num + 1)
            assert not eventually(further, within_s=0.05)
            copy.passed(ends=False)
        checked.result(WAIT_S_MAX)
