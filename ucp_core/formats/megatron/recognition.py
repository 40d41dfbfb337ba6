"""Recognises Megatron-LM's checkpoints from before ``torch_dist`` by the names of their files."""

import re

from ucp_core.storage import Store, join

NAME = "megatron"
LATEST = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
MODEL_FILE = "model_optim_rng.pt"
_LATEST_BYTES_MAX = 64


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is such a checkpoint, or holds the latest one."""
    return is_checkpoint(store, directory) or any(
        is_checkpoint(store, join(directory, name)) for name in latest(store, directory)
    )


def latest(store: Store, directory: str) -> list[str]:
    """Return the name of the latest iteration's folder, if a file names it."""
    path = join(directory, LATEST)
    if not store.exists(path) or store.size(path) > _LATEST_BYTES_MAX:
        return []
    text = store.read(path).decode("utf-8", "replace").strip()
    if text == "release":
        return [text]
    return [f"iter_{int(text):07d}"] if text.isdecimal() else []


def is_checkpoint(store: Store, directory: str) -> bool:
    """Return whether ``directory`` itself holds a folder of a rank with its file."""
    ranks = [name for name in store.list(directory) if RANK.fullmatch(name)]
    return any(MODEL_FILE in store.list(join(directory, name)) for name in ranks)
