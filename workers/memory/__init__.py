"""Manage memory that outlives a trainer: arenas of buffers, and the versions in them."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door
from workers.memory.arena import NUM_BUFFERS, Arena
from workers.memory.credits import PATIENCE_S, Credits
from workers.memory.descriptors import (
    ANSWER_S,
    PACKET_BYTES,
    adopt,
    descriptor_socket,
    notice_socket,
    notify,
    open_arena,
    reserve,
)
from workers.memory.retention import (
    HeldArena,
    copy_name,
    counts,
    guard_name,
    in_use,
    is_copy,
    is_guard,
    is_parity,
    owner_of,
    reapable,
    replica_parity_name,
    split_name,
    version_of,
    worth,
)

if TYPE_CHECKING:
    from workers.memory.arena_store import ArenaStore
    from workers.memory.checksums import Checksums, Question
    from workers.memory.cuda import CopyStream, CudaStream, Mark
    from workers.memory.versions import (
        LocalPart,
        MemoryTier,
        Part,
        ask_part,
        mapped_part,
        open_version,
    )
    from workers.memory.worker_memory import HandOver, SnapshotMemory


# Importing this room loads numpy and torch only when they are needed.
__getattr__ = lazy_door(__name__)
