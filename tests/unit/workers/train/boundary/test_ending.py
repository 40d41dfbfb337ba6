"""Whether a run that is resumed has ended, when storage does not say."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.made import assignment_of, held_of
from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, Store
from workers.protocol import STOPPED, PartRef
from workers.settings import CheckpointSettings, Settings
from workers.telemetry import ProgressRecord
from workers.train.boundary import ending as room
from workers.train.boundary.ending import Ending
from workers.train.boundary.store import StorageWriter
from workers.train.context import WorkerContext

IN_MEMORY = (PartRef(node="a", arena="w0001.0", held=held_of(5, world_size=1, data_bytes=1)),)


class SilentStore(LocalStore):
    """A store that answers no read until ``back`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def read(self, path: str) -> bytes:
        self.back.wait()
        return super().read(path)


def ending(folder: Path, memory: tuple[PartRef, ...], store: Store) -> Ending:
    context = WorkerContext(
        worker="w0001",
        settings=Settings(),
        store=store,
        directory=str(folder),
        progress=ProgressRecord.create(folder / "page", worker="w0001"),
        ring_path=str(folder / "ring"),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )
    assignment = assignment_of(attempt=2, resume=(5, 1), lineage=((1, 0), (2, 5)), memory=memory)
    storage = StorageWriter(
        store=store,
        directory=str(folder),
        assignment=assignment,
        settings=CheckpointSettings(),
        fenced=lambda: False,
        moved=lambda _: None,
    )
    return Ending(assignment, context, storage.write, storage.read)


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    """Return a store that answers after the test."""
    store = SilentStore()
    yield store
    store.back.set()


def test_storage_that_is_away_keeps_no_run_from_what_memory_holds(tmp_path: Path) -> None:
    """Each attempt of a long outage failed there, although its state was loaded."""
    # It is there and cannot be read.
    (tmp_path / STOPPED).mkdir()

    assert not ending(tmp_path, IN_MEMORY, LocalStore()).resumed()
    with pytest.raises(StorageError):
        ending(tmp_path, (), LocalStore()).resumed()


def test_storage_that_is_silent_keeps_no_run_from_what_memory_holds(
    tmp_path: Path, silent: SilentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt waited 15 s longer than the storage was silent."""
    monkeypatch.setattr(room, "_READ_S_MAX", 0.01)
    (tmp_path / STOPPED).write_text(json.dumps({"step": 5, "attempt": 1, "reason": "enough"}))

    assert not ending(tmp_path, IN_MEMORY, silent).resumed()
    silent.back.set()
    monkeypatch.setattr(room, "_READ_S_MAX", 120.0)
    assert ending(tmp_path, IN_MEMORY, silent).resumed()
