"""The journal on storage: one segment per life of the controller, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ucp_core.storage import Store, join

DIRECTORY = "journal"


def read_segments(store: Store, run_path: str) -> list[bytes]:
    """Return the content of every segment in the run directory, oldest first."""
    directory = join(run_path, DIRECTORY)
    names = sorted(name for name in store.list(directory) if name.endswith(".jsonl"))
    return [store.read(join(directory, name)) for name in names]


class JournalFile:
    """Appends to the segment of this life; earlier segments are never written again.

    A line is handed to the operating system before its actions run, so it survives the
    controller's process. It is not synced to the disk: the loss of the controller's machine
    and of its page cache costs the last events, which the survey of living workers replaces.

    Args:
        store: Where the run directory is.
        run_path: Its path there.
        life: Which life of the controller this is, from 1.
    """

    def __init__(self, store: Store, run_path: str, *, life: int) -> None:
        self._store = store
        self._path = join(run_path, DIRECTORY, f"{life:06d}.jsonl")

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write ``records`` behind what is there."""
        lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        self._store.append(self._path, "".join(lines).encode())
