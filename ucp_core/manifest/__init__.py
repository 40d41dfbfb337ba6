"""Parses, validates, prints and merges the documents that define checkpoints. Pure."""

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
