"""Recognises Megatron-LM's checkpoints from before ``torch_dist`` by the names of their files."""

import re
from collections.abc import Callable

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.refusals import corrupt
from ucp_core.storage import Store, join

NAME = "megatron"
#: The file in which Megatron names the latest iteration.
TRACKER = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
MODEL_FILE = "model_optim_rng.pt"
_ITERATION = re.compile(r"\d{1,12}|release")
_TRACKER_BYTES_MAX = 64


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is such a checkpoint, or holds the latest one."""
    return is_there(store, directory, is_checkpoint)


def is_there(store: Store, directory: str, is_one: Callable[[Store, str], bool]) -> bool:
    """Return whether ``located`` finds a checkpoint; a damaged tracker may be another program's."""
    try:
        return located(store, directory, None, is_one) is not None
    except CheckpointCorruptError:
        return False


def located(
    store: Store, directory: str, tag: str | None, is_one: Callable[[Store, str], bool]
) -> str | None:
    """Return ``directory`` or the folder of a tag or of the latest iteration in it, or None."""
    if tag is None and is_one(store, directory):
        return directory
    path = join(directory, TRACKER)
    if tag is None and store.exists(path):
        text = store.read_range(path, 0, min(store.size(path), _TRACKER_BYTES_MAX))
        tag = text.decode(errors="replace").strip()
        if not _ITERATION.fullmatch(tag):
            raise corrupt(path, f"it says {tag[:40]!r}, which is not an iteration")
        tag = tag if tag == "release" else f"iter_{int(tag):07d}"
    if tag is None or not is_one(store, where := join(directory, tag)):
        return None
    return where


def is_checkpoint(store: Store, directory: str) -> bool:
    """Return whether ``directory`` itself holds a folder of a rank with its file."""
    ranks = [name for name in store.list(directory) if RANK.fullmatch(name)]
    return any(MODEL_FILE in store.list(join(directory, name)) for name in ranks)
