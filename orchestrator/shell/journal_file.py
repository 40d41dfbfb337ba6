"""The journal on storage: one segment per life of the controller, one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.journal import Record, encode
from ucp_core.storage import Store, join

DIRECTORY = "journal"


def read_lines(store: Store, run_path: str) -> list[str]:
    """Return the whole lines of every segment in the run directory, oldest first.

    A life that ended while it wrote leaves a torn last line; it was not acted upon, because
    actions are performed after their line is written.
    """
    directory = join(run_path, DIRECTORY)
    names = sorted(name for name in store.list(directory) if name.endswith(".jsonl"))
    texts = (store.read(join(directory, name)).decode() for name in names)
    return [line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]


class JournalFile:
    """Appends to the segment of this life; earlier segments are never written again.

    A line is handed to the operating system before its actions run, so it survives the
    controller's process. It is not synced to the disk: the loss of the controller's machine
    and of its page cache costs the last events, which the survey of living workers replaces.

    Args:
        store: Where the run directory is.
        run_path: Its path there.
    """

    def __init__(self, store: Store, run_path: str) -> None:
        self._store = store
        directory = join(run_path, DIRECTORY)
        self.life = sum(name.endswith(".jsonl") for name in store.list(directory)) + 1
        self._path = join(directory, f"{self.life:06d}.jsonl")

    def append(self, records: Iterable[Record]) -> None:
        """Write ``records`` behind what is there."""
        self._store.append(self._path, "".join(encode(r) + "\n" for r in records).encode())
