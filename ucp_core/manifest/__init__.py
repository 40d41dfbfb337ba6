"""The document that defines a checkpoint: parse, validate, print, merge. Pure."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.manifest.document import (
        FileEntry,
        Item,
        Kind,
        Manifest,
        from_bytes,
        merge,
        to_bytes,
        to_json,
    )
    from ucp_core.manifest.validation import Problem

__all__ = [
    "FileEntry",
    "Item",
    "Kind",
    "Manifest",
    "Problem",
    "from_bytes",
    "merge",
    "to_bytes",
    "to_json",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.manifest.document": (
            "FileEntry",
            "Item",
            "Kind",
            "Manifest",
            "from_bytes",
            "merge",
            "to_bytes",
            "to_json",
        ),
        "ucp_core.manifest.validation": ("Problem",),
    },
)
