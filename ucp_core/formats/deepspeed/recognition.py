"""Recognises DeepSpeed's checkpoints by the names of their files."""

from __future__ import annotations

from ucp_core.formats.deepspeed.reading import looks_like_deepspeed
from ucp_core.storage import Store

NAME = "deepspeed"


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a checkpoint of DeepSpeed, or holds some under tags."""
    return looks_like_deepspeed(store, directory)
