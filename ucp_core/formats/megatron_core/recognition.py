"""Recognises Megatron-core's ``torch_dist`` checkpoints by the names of their files."""

import re

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.dcp import metadata_names
from ucp_core.storage import Store, join

NAME = "megatron-core"
CONFIG = "metadata.json"
COMMON = "common.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"\d{1,12}|release")


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a ``torch_dist`` checkpoint, or holds the latest one."""
    try:
        return located(store, directory, None) is not None
    except CheckpointCorruptError:
        return False


def located(store: Store, directory: str, tag: str | None) -> str | None:
    """Return the directory of the iteration to read, or None."""
    where = directory if tag is None else join(directory, tag)
    names = store.list(where)
    if _is_one(names):
        return where
    if tag is not None or TRACKER not in names:
        return None
    text = store.read(join(directory, TRACKER)).decode(errors="replace").strip()
    if not _ITERATION.fullmatch(text):
        raise CheckpointCorruptError(
            f"{join(directory, TRACKER)} says {text[:40]!r}, which is not an iteration",
            path=join(directory, TRACKER),
        )
    folder = text if text == "release" else f"iter_{int(text):07d}"
    names = store.list(join(directory, folder))
    return join(directory, folder) if _is_one(names) else None


def _is_one(names: tuple[str, ...]) -> bool:
    """Return whether these are the files of a checkpoint, even if one of the two is lost."""
    return not {CONFIG, COMMON}.isdisjoint(names) and bool(metadata_names(names))
