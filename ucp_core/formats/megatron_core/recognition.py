"""Recognises Megatron-core's ``torch_dist`` checkpoints by the names of their files."""

from ucp_core.formats.dcp import metadata_names
from ucp_core.formats.megatron import is_there
from ucp_core.storage import Store

NAME = "megatron-core"
CONFIG = "metadata.json"
COMMON = "common.pt"


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a ``torch_dist`` checkpoint, or holds the latest one."""
    return is_there(store, directory, is_checkpoint)


def is_checkpoint(store: Store, directory: str) -> bool:
    """Return whether a folder has a checkpoint's files, even if one of the two is lost."""
    names = store.list(directory)
    return not {CONFIG, COMMON}.isdisjoint(names) and bool(metadata_names(names))
