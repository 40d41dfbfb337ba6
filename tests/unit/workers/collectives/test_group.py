"""The recorded group over torch's own fake group, with tensors of a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

from workers.collectives import AbortedError, nccl
from workers.collectives.attempt import Attempt
from workers.collectives.group import RecordedGroup

NAME = "everstep_test_device"


class Reached:
    """A place that the device has come to."""

    def is_reached(self) -> bool:
        return True


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """An attempt of two ranks, whose world is a recorded group on a device."""
    monkeypatch.setattr(nccl, "Start", Reached)
    path = str(tmp_path / "w0.ring")
    found = Attempt(1, backend="gloo", world_size=2, timeout_s=60.0, ring_path=path)

    def create(options: Any, _: Any) -> RecordedGroup:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        made: Any = FakeProcessGroup
        fake = made._create_internal(0, 2, made.Options())
        inner = dist.ProcessGroup(options.store, 0, 2)
        inner._register_backend(torch.device("cuda"), kind, fake)
        inner._set_default_backend(kind)
        group = RecordedGroup(found, inner, {"cuda": (kind, fake)}, ranks=(0, 1), rank=0)
        found.add(group)
        return group

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()
    found.leave()
    dist.Backend._plugins.pop(NAME.upper())


def exchange() -> list[dist.Work]:
    """Send to rank 1 and receive from it, as the middle of a pipeline does."""
    with FakeTensorMode():
        there, back = torch.empty(3, device="cuda"), torch.empty(3, device="cuda")
        sends = dist.P2POp(dist.isend, there, 1)
        return dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, back, 1)])


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
