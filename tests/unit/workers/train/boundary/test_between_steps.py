"""A rank's work between two steps, beside a device that runs collectives later."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.made import assignment_of
from tests.support.snapshot_rank import Node, captured, state
from tests.support.snapshots import eventually
from ucp_core.layout import ParallelLayout
from ucp_core.storage import MemoryStore
from workers.memory import SnapshotMemory
from workers.settings import Settings
from workers.state import HostBuffer
from workers.telemetry import ProgressRecord
from workers.train import WorkerContext
from workers.train.boundary.between_steps import Boundary
from workers.train.boundary.cadence import Due
from workers.train.boundary.store import StorageWriter


class _Reads(TorchFunctionMode):
    """Calls somebody where the host reads what a device has: there, and only there, it waits."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.tolist:
            self._told()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def boundary(node: Node, tmp_path: Path) -> Iterator[Boundary]:
    context = WorkerContext(
        worker="w0001",
        settings=Settings(),
        store=MemoryStore(),
        directory="run",
        progress=ProgressRecord.create(tmp_path / "page", worker="w0001"),
        ring_path=str(tmp_path / "ring"),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
        keeper_directory=node.directory,
    )
    assignment = assignment_of(layout=ParallelLayout(dp_shard=2))
    storage = StorageWriter(
        store=context.store,
        directory="run",
        assignment=assignment,
        settings=context.settings.checkpoint,
        fenced=lambda: False,
        moved=lambda _: None,
    )
    made = Boundary(
        assignment,
        context,
        device=torch.device("cpu"),
        buffer=HostBuffer(),
        memory=SnapshotMemory(node.directory, "w0001"),
        storage=storage,
    )
    yield made
    assert made.close()
    assert storage.close()


def test_no_buffer_is_written_over_before_a_rank_knows_that_all_have_the_version_before(
    boundary: Boundary, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective on a device returns at once; of the buffers one may hold what others need."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    entries, writer = state(), boundary._writer
    assert writer is not None
    writer.prepare(captured(0, entries))
    assert eventually(lambda: writer.is_ready)
    for step in (1, 2, 3):
        boundary._due = Due(snapshot=True)
        assert boundary._take(captured(step, entries))
        writer.complete(pin=False)
        assert writer.wait(step)
    read: list[list[int]] = []
    boundary._due = Due(snapshot=True, barrier=True)
    with _Reads(lambda: read.append(node.steps())):
        assert boundary._take(captured(4, entries))

    assert read == [[1, 2, 3]]
    assert node.steps() == [2, 3]
