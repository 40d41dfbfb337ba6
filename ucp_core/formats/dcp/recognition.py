"""Recognises the checkpoints of torch DCP by the names of their files."""

import re
from collections.abc import Iterable

from ucp_core.storage import Store, join

NAME = "dcp"
METADATA_NAME = ".metadata"
#: With ``use_collectives=False`` each rank writes a file of its own.
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
#: Accelerate and the Trainer of transformers keep model and optimizer in folders of their own.
_PARTS = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a checkpoint of torch DCP, in one of its forms."""
    names = store.list(directory)
    if metadata_names(names) or parts_of(store, directory, names):
        return True
    return any(name.startswith("shard-") and name.endswith(".safetensors") for name in names)


def metadata_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the metadata files among ``names``: one file, or one for each rank."""
    found = tuple(names)
    if METADATA_NAME in found:
        return (METADATA_NAME,)
    ranks = {int(m[1]): m[0] for m in map(_RANK_METADATA.fullmatch, found) if m}
    return tuple(ranks[rank] for rank in sorted(ranks))


def parts_of(store: Store, directory: str, names: tuple[str, ...]) -> list[str]:
    """Return Accelerate's folders."""
    found = [name for name in names if _PARTS.fullmatch(name)]
    return [name for name in found if metadata_names(store.list(join(directory, name)))]
