"""Checkpoints: save without communication, commit, find, open, load, materialise, verify.

A checkpoint is a directory. Every rank writes one data file, then one record, both with the
attempt in their name; whoever sees the records of all ranks writes ``manifest.json``, and that is
the commit. Nothing here talks to another process. ``SPEC.md`` is the normative text. In order:

- ``save_rank`` by every rank, at a step boundary; the last one commits.
- ``find_committed`` after a fence, then ``load`` by every rank of the next attempt.
- ``collect_garbage`` by one process, after a commit.
- ``materialise`` makes a universal checkpoint, ``verify`` reads every byte of either kind.
"""

from __future__ import annotations

from ucp_core.conversion import materialise
from ucp_core.inspection import verify
from ucp_core.native import (
    MANIFEST_NAME,
    Checkpoint,
    Found,
    LoadResult,
    LocalTensor,
    RankSaver,
    SaveResult,
    checkpoint_name,
    collect_garbage,
    find_committed,
    load,
    open_checkpoint,
    reading,
    save_rank,
    try_commit,
    unloadable,
    verify_extents,
)

__all__ = [
    "MANIFEST_NAME",
    "Checkpoint",
    "Found",
    "LoadResult",
    "LocalTensor",
    "RankSaver",
    "SaveResult",
    "checkpoint_name",
    "collect_garbage",
    "find_committed",
    "load",
    "materialise",
    "open_checkpoint",
    "reading",
    "save_rank",
    "try_commit",
    "unloadable",
    "verify",
    "verify_extents",
]
