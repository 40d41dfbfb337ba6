"""Whether a run that is resumed has ended, when storage does not say."""

from pathlib import Path

import pytest

from tests.support.made import assignment_of, held_of
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore
from workers.protocol import STOPPED, PartRef
from workers.settings import Settings
from workers.telemetry import ProgressRecord
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
    assignment = assignment_of(attempt=2, resume=(5, 1), lineage=((1, 0), (2, 5)), memory=memory)
    return Ending(assignment, context, lambda *_: None)


def test_storage_that_is_away_keeps_no_run_from_what_memory_holds(tmp_path: Path) -> None:
    """Each attempt of a long outage failed there, although its state was loaded."""
    # It is there and cannot be read.
    (tmp_path / STOPPED).mkdir()
    held = held_of(5, world_size=1, data_bytes=1)
    part = PartRef(node="a", arena="w0001.0", held=held)

    assert not ending(tmp_path, (part,)).resumed()
    with pytest.raises(StorageError):
        ending(tmp_path, ()).resumed()
