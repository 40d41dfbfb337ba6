"""Reads checkpoints of torch DCP: FSDP, FSDP2, HSDP, tensor parallelism, single processes.

A chunk becomes a fragment; nothing is copied. Torch overwrites data and metadata in place, the
metadata last. After a crash in between, old metadata may describe new data. The reader notices this
if sizes, shapes, dtypes or torch's checksums differ. It cannot notice a save of the same layout
that ended between two files.
"""

from ucp_core.errors import CheckpointNotFoundError, UnsupportedVersionError
from ucp_core.formats.dcp.directory import read_container
from ucp_core.formats.dcp.recognition import NAME, metadata_names, parts_of
from ucp_core.formats.dcp.safetensors import sharded_container
from ucp_core.formats.dcp.state import state_of
from ucp_core.language import Rules
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a checkpoint of torch DCP; only metadata and small items are read.

    See ``open_source`` for arguments and errors. ``rules`` are ignored: the metadata say which box
    every file holds. ``tag`` is a folder in ``directory``, if that holds several checkpoints.
    """
    del rules
    where = directory if tag is None else join(directory, tag)
    names = store.list(where)
    parts = [""] if metadata_names(names) else parts_of(store, where, names)
    container = read_container(store, where, parts) if parts else None
    if container is None:
        container = sharded_container(store, where, names)
    if container is None:
        raise CheckpointNotFoundError(
            f"{where} has no .metadata: it is not a checkpoint of torch DCP, or its save was "
            "not finished",
            path=where,
        )
    if not container.tensors:
        raise UnsupportedVersionError(
            f"{container.where} names no tensor: none was saved, or whole states were saved as one "
            "pickle each; save with flatten_state_dict=True, the default of DefaultSavePlanner",
            path=container.where,
        )
    return state_of(container).checkpoint({"format": NAME, "version": container.version})
