"""A writer that is killed at any operation leaves the whole checkpoint, or what no reader takes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.support.checkpoints import ROOT, save, small_state
from ucp_core.errors import UcpError
from ucp_core.formats import export, open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.inspection import diff
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import Buffer, MemoryStore

MEMORY = 8 << 20


class _KilledError(Exception):
    """The process is gone; it cleans nothing up."""


class _KillingStore(MemoryStore):
    """Does ``operations`` changes and then no more."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left = operations

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _KilledError

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        self._count()
        return super().write_file(path, chunks, fsync=fsync)

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        self._count()
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)

    def delete(self, path: str) -> None:
        self._count()
        super().delete(path)


def _source() -> Checkpoint:
    store = MemoryStore()
    save(store, small_state(), step=7)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    extra = {"huggingface": {"config.json": {"model_type": "x"}, "generation_config.json": {}}}
    return replace(opened, manifest=replace(opened.manifest, extra=extra))


def _huggingface(source: Checkpoint, store: MemoryStore) -> None:
    export(source, store, "out", format="huggingface", memory_bytes=MEMORY, shard_bytes=40)


def _dcp(source: Checkpoint, store: MemoryStore) -> None:
    with patch.object(dcp_writer, "FILE_BYTES", 2000):
        export(source, store, "out", format="dcp", memory_bytes=MEMORY)


@pytest.mark.parametrize("write", [_huggingface, _dcp])
def test_a_killed_export_is_whole_or_refused(
    write: Callable[[Checkpoint, MemoryStore], None],
) -> None:
    """At every operation in turn; what is left must not look like a smaller checkpoint."""
    source = _source()
    finished, operations = False, 0
    while not finished:
        store = _KillingStore(operations)
        try:
            write(source, store)
            finished = True
        except _KilledError:
            pass
        store.left = 1000
        try:
            back = open_source(store, "out")
        except UcpError:
            assert not finished
        else:
            report = diff(source, back, slots=["weight"])
            assert report.equal, f"killed at operation {operations}"
            assert report.num_equal == 4
        operations += 1

    assert operations > 4, "the export was too small to be cut anywhere"
