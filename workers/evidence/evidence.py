"""Collect the evidence of a node when an attempt ends, and store it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ucp_core.storage import Store, join

#: The folders that an incident has.
STACKS: Final = "stacks"
RINGS: Final = "rings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Stacks and rings of the workers of one node, by worker."""

    stacks: Mapping[str, str]
    rings: Mapping[str, bytes]

    def store(self, store: Store, folder: str) -> None:
        """Write a file for each worker's stacks and ring below ``folder``."""
        for worker, text in self.stacks.items():
            path = join(folder, STACKS, f"{worker}.txt")
            store.write_atomic(path, text.encode(), fsync=False)
        for worker, ring in self.rings.items():
            store.write_atomic(join(folder, RINGS, f"{worker}.ring"), ring, fsync=False)


def copies(rings: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the content of the existing rings, by worker. Reading a large ring takes 10 ms."""
    found: dict[str, bytes] = {}
    for worker, path in rings.items():
        with contextlib.suppress(OSError):
            found[worker] = path.read_bytes()
    return found
