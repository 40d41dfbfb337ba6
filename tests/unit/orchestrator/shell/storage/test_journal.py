"""The journal on a disk that fills up."""

import errno
import json
import threading
from pathlib import Path

import pytest

from orchestrator.shell.storage import journal as module
from orchestrator.shell.storage.journal import JournalFile, read_segments
from tests.support.snapshots import eventually
from ucp_core.errors import StorageError
from ucp_core.storage import Buffer, LocalStore


class Filling(LocalStore):
    """Takes half of what is appended while it is full."""

    why = 0

    def append(self, path: str, data: Buffer, *, fsync: bool = False) -> None:
        whole = bytes(data)
        super().append(path, whole[: len(whole) // 2] if self.why else whole, fsync=fsync)
        if self.why:
            raise StorageError("the file system is full", errno=self.why)


def test_a_line_waits_for_room_and_is_whole_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that gave way could not begin again either, and the run was lost with it."""
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    store = Filling()
    journal = JournalFile(store, str(tmp_path), incarnation=1, before_bytes=0)
    journal.append([{"seq": 0}])
    store.why = errno.ENOSPC
    writing = threading.Thread(target=journal.append, args=([{"seq": 1, "kind": "Ticked"}],))
    writing.start()
    assert eventually(lambda: journal.trouble == "the file system is full")

    store.why = 0
    writing.join()
    journal.append([{"seq": 2}])

    assert journal.trouble == ""
    (segment,) = read_segments(store, str(tmp_path))
    assert [json.loads(line)["seq"] for line in segment.splitlines()] == [0, 1, 2]


def test_another_error_is_for_the_next_controller(tmp_path: Path) -> None:
    """It may be one of this process, such as a limit."""
    store = Filling()
    store.why = errno.EFBIG

    with pytest.raises(StorageError):
        JournalFile(store, str(tmp_path), incarnation=1, before_bytes=0).append([{"seq": 0}])
