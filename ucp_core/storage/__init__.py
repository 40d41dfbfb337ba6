"""Where bytes are kept: one protocol, and stores for local files, fsspec URLs and memory."""

from __future__ import annotations

from ucp_core.storage.base import ReadRange, Store, join
from ucp_core.storage.local import LocalStore
from ucp_core.storage.memory import MemoryStore
from ucp_core.storage.url import open_store

__all__ = ["LocalStore", "MemoryStore", "ReadRange", "Store", "join", "open_store"]
