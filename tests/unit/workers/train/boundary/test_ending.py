"""Whether a run that is resumed has ended, when storage does not say."""

from pathlib import Path

import pytest

from ucp_core.errors import StorageError
from ucp_core.layout import ParallelLayout
from ucp_core.storage import LocalStore
from workers.protocol import STOPPED, Assignment, Held, PartRef
from workers.records import ProgressRecord
from workers.settings import Settings
from workers.train.boundary.ending import Ending
from workers.train.context import WorkerContext


def ending(folder: Path, memory: tuple[PartRef, ...]) -> Ending:
    context = WorkerContext(
        worker="w0001",
        settings=Settings(),
        store=LocalStore(),
        directory=str(folder),
        progress=ProgressRecord.create(folder / "page", worker="w0001"),
        ring_path=str(folder / "ring"),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )
    assignment = Assignment(
        attempt=2,
        rank=0,
        layout=ParallelLayout(),
        store_host="",
        store_port=0,
        resume_step=5,
        resume_attempt=1,
        lineage=((1, 0), (2, 5)),
        memory=memory,
    )
    return Ending(assignment, context, lambda *_: None)


def test_storage_that_is_away_keeps_no_run_from_what_memory_holds(tmp_path: Path) -> None:
    """Each attempt of a long outage failed there, although its state was loaded."""
    # It is there and cannot be read.
    (tmp_path / STOPPED).mkdir()
    held = Held(
        buffer=0, sequence=2, attempt=1, step=5, rank=0, world_size=1, data_bytes=1, record_bytes=1
    )
    part = PartRef(node="a", arena="w0001.0", held=held)

    assert not ending(tmp_path, (part,)).resumed()
    with pytest.raises(StorageError):
        ending(tmp_path, ()).resumed()
