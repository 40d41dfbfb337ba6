"""Where bytes are kept: one protocol, and stores for local files, fsspec URLs and memory."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.storage.base import Buffer, ReadRange, Store, ask_ahead, join, temporary_name
    from ucp_core.storage.local import LocalStore
    from ucp_core.storage.memory import MemoryStore
    from ucp_core.storage.recycling import RecyclingStore
    from ucp_core.storage.refusing import RefusingStore
    from ucp_core.storage.reserving import may_reserve
    from ucp_core.storage.undoing import tidied, undone
    from ucp_core.storage.url import open_store

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "ReadRange",
    "RecyclingStore",
    "RefusingStore",
    "Store",
    "ask_ahead",
    "join",
    "may_reserve",
    "open_store",
    "temporary_name",
    "tidied",
    "undone",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.storage.base": (
            "Buffer",
            "ReadRange",
            "Store",
            "ask_ahead",
            "join",
            "temporary_name",
        ),
        "ucp_core.storage.local": ("LocalStore",),
        "ucp_core.storage.memory": ("MemoryStore",),
        "ucp_core.storage.recycling": ("RecyclingStore",),
        "ucp_core.storage.refusing": ("RefusingStore",),
        "ucp_core.storage.reserving": ("may_reserve",),
        "ucp_core.storage.undoing": ("tidied", "undone"),
        "ucp_core.storage.url": ("open_store",),
    },
)
