"""Take versions of the training state into memory, which keepers hold."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.snapshot.final import FINAL_S_MAX, Fallback
    from workers.snapshot.passes import on_passes
    from workers.snapshot.writing import Captured, SnapshotMemory, SnapshotWriter, source_of


__getattr__ = lazy_door(__name__)
