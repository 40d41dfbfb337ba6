"""Versions of the training state in memory: taken by trainers, held by keepers."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.snapshot.final import FAREWELL_S_MAX, Footing
    from workers.snapshot.passes import on_passes
    from workers.snapshot.writing import Captured, SnapshotMemory, SnapshotWriter, source_of

__all__ = [
    "FAREWELL_S_MAX",
    "Captured",
    "Footing",
    "SnapshotMemory",
    "SnapshotWriter",
    "on_passes",
    "source_of",
]

__getattr__ = lazy_door(
    __name__,
    {
        "workers.snapshot.final": ("FAREWELL_S_MAX", "Footing"),
        "workers.snapshot.passes": ("on_passes",),
        "workers.snapshot.writing": ("Captured", "SnapshotMemory", "SnapshotWriter", "source_of"),
    },
)
