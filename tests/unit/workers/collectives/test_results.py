"""The remains of an aborted collective on a device never pass for its result.

The device is simulated: tensors say that they are on one, and collectives leave anything.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.fake_ranks import built_of
from ucp_core.layout import ParallelLayout
from workers.collectives import AbortedError, forming, on_host, reading, settled
from workers.collectives.attempt import Attempt
from workers.parallel import ModelPlan
from workers.state import PersistentBuffers
from workers.train.boundary.replicas import refuse_diverged
from workers.train.executor import all_agree, by_rank, exchanged, summed


class Running:
    """Stands for a stream and for an event in it, which the device has come to."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return at once."""


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """Yield the attempt of this process, whose device an abort has stopped in a collective."""
    found = Attempt(3, backend="gloo", world_size=2, timeout_s=60.0, ring_path=str(tmp_path / "r"))
    with monkeypatch.context() as patch:
        patch.setattr(forming._process, "current", found)
        yield found
    found.leave()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch notes once which functions ``torch.device`` acts on: before one of them is replaced.
    with torch.device("cpu"):
        empty, _ = torch.empty, torch.zeros(0)

    def pinned(*sizes: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        del pin_memory
        return empty(*sizes, **how)

    def leave_anything(result: Tensor, *_args: Any, **_how: Any) -> None:
        result.copy_(torch.arange(result.numel()).reshape(result.shape) + 7)

    monkeypatch.setattr(dist, "all_reduce", leave_anything)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Running)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Running())
    monkeypatch.setattr(torch, "empty", pinned)


@pytest.fixture
def built() -> Iterator[Any]:
    layout = ParallelLayout(dp_replicate=2)
    yield built_of(Counted, ModelPlan(), layout, rank=0, attempt=1)
    dist.destroy_process_group()


PLACES: dict[str, Callable[[Any], object]] = {
    "numbers": lambda _: on_host(torch.ones(2)),
    "numbers read later": lambda _: reading(torch.ones(2))(),
    "a tensor": lambda _: settled(torch.ones(2)),
    "a vote": lambda _: all_agree(agreed=True, device=torch.device("cpu")),
    "a whole weight": lambda _: summed(torch.ones(2)),
    "numbers of all ranks": lambda _: by_rank(torch.ones(2)),
    "words of all ranks": lambda _: exchanged(["a"], torch.device("cpu")),
    "copies of weights": lambda built: refuse_diverged(2, built),
}


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("use", PLACES.values(), ids=PLACES)
def test_an_aborted_result_is_no_result(
    use: Callable[[Any], object], built: Any, attempt: Attempt
) -> None:
    """Copies that seem to differ end the run, and a file would replace a good one."""
    attempt.aborted.set()

    with pytest.raises(AbortedError, match="attempt 3 was aborted"):
        use(built)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("averaged", [["mean"], []], ids=["averaged", "equal"])
def test_an_aborted_result_becomes_no_buffer(averaged: list[str], attempt: Attempt) -> None:
    """The survivors' final snapshots would commit it, since the step counts as done."""
    model = Counted()
    buffers = PersistentBuffers(model, averaged)
    buffers.begin_step(1)
    buffers.begin_pass()
    model.mean.add_(1)  # type: ignore[operator]
    buffers.end_pass(0, 1)
    attempt.aborted.set()

    with pytest.raises(AbortedError, match="attempt 3 was aborted"):
        buffers.end_step(1, 1, in_order=True)

    assert buffers.named()["mean"].tolist() == [0.0, 0.0, 0.0]
