"""A store in memory that notes what is read."""

from collections.abc import Sequence

from ucp_core.storage import MemoryStore, ReadRange


class CountingStore(MemoryStore):
    """Notes ``(path, offset_bytes, size_bytes)`` of every range that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Read, and note it."""
        self.reads += [(path, start, sum(map(len, buffers))) for start, buffers in ranges]
        super().read_ranges(path, ranges)

    @property
    def read_bytes(self) -> int:
        """Return how much was read."""
        return sum(size for _, _, size in self.reads)
