"""The document that defines a checkpoint: parse, validate, print, merge. Pure."""

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
