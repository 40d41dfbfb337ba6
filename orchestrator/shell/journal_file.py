"""The journal on storage: one segment per life of the controller, one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

from ucp_core.storage import Store

DIRECTORY = "journal"


class JournalFile:
    """Appends to the segment of this life; earlier segments are never written again.

    A line is handed to the operating system before its actions run, so it survives the
    controller's process. It is not synced to the disk: the loss of the controller's machine
    and of its page cache costs the last events, which the survey of living workers replaces.

    Args:
        store: Where the run directory is.
        run_path: Path of the run directory in ``store``.
    """

    def __init__(self, store: Store, run_path: str) -> None:
        self._store = store
        self._directory = f"{run_path}/{DIRECTORY}"
        earlier = self.segments()
        self.life = len(earlier) + 1
        self._path = f"{self._directory}/{self.life:06d}.jsonl"

    def segments(self) -> list[str]:
        """Return the paths of all segments, oldest first."""
        names = self._store.list(self._directory)
        return [f"{self._directory}/{name}" for name in sorted(names) if name.endswith(".jsonl")]

    def read(self) -> list[bytes]:
        """Return the content of every earlier segment, oldest first."""
        return [self._store.read(path) for path in self.segments() if path != self._path]

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write ``records`` behind what is there."""
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        self._store.append(self._path, lines.encode())
