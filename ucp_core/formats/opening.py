"""Opens checkpoints of any format without copying them.

A format is a package with two modules: ``recognition`` with ``NAME`` and
``recognise(store, directory) -> bool``, which imports almost nothing, and ``reader`` with
``read(store, directory, *, rules, tag) -> Checkpoint``, imported only for its own format.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointNotFoundError
from ucp_core.native import MANIFEST_NAME, UNFINISHED_NAME, Checkpoint, open_checkpoint
from ucp_core.storage import Store, join, within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.language import Rules

#: The order matters: a folder of Megatron-core is also one of torch DCP.
_FORMATS = ("deepspeed", "megatron_core", "megatron", "dcp", "huggingface")

_NATIVE = "everstep"


def recognise(store: Store, directory: str) -> str | None:
    """Return the name of the format of ``directory``, or None if none is known.

    ``everstep`` is the universal format; the others have the ``NAME`` of their package.
    """
    if store.exists(join(directory, MANIFEST_NAME)):
        return _NATIVE
    found = _recognised(store, directory)
    return None if found is None else found[1]


def open_source(
    store: Store,
    directory: str,
    *,
    rules: Rules | None = None,
    rename: Mapping[str, str] | None = None,
    tag: str | None = None,
    memory_bytes: int | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format; read only headers and pickles.

    Args:
        store: The storage.
        directory: The checkpoint, or the folder that holds it under a tag.
        rules: How tensors are sharded, and which are tied, for sources that do not say so.
        rename: New fqn by the source's fqn; applies to every slot, group, tie and role.
        tag: Chooses one of several checkpoints in ``directory``, if the format has tags.
        memory_bytes: Most memory for the content of another framework's files besides tensors;
            default: 6 GiB.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        CheckpointCorruptError: It contradicts itself, or a file is missing or damaged.
        PatternError: A tensor's pattern is unknown, or does not fit its shards.
        ForeignClassError: A pickle holds an unknown class; nothing was executed.
        MemoryBudgetError: The pickles or small values would take more than ``memory_bytes``.
        UnsupportedVersionError: The source says that it cannot be converted.
        StorageError: A file cannot be read.
    """
    checkpoint = _open(within(store, directory), directory, rules, tag, memory_bytes)
    manifest = checkpoint.manifest
    if rules is not None and rules.ties:
        from ucp_core.language import tie

        manifest = tie(manifest, rules.ties)
    if rename:
        from ucp_core.language import rename as rename_manifest

        manifest = rename_manifest(manifest, rename)
    return replace(checkpoint, manifest=manifest, given=directory)


def _open(
    store: Store,
    directory: str,
    rules: Rules | None,
    tag: str | None,
    memory_bytes: int | None,
) -> Checkpoint:
    if store.exists(join(directory, MANIFEST_NAME)):
        if tag is not None:
            raise CheckpointNotFoundError(
                f"{directory} is one checkpoint of {_NATIVE}, which has no tags: open it without "
                f"the tag {tag!r}",
                path=directory,
            )
        return open_checkpoint(store, directory)
    # The files of a conversion may already have their names, which Hugging Face's reader would
    # accept.
    is_unfinished = bool(store.list(join(directory, UNFINISHED_NAME)))
    found = None if is_unfinished else _recognised(store, directory)
    if found is None:
        parent, _, name = directory.rpartition("/")
        if is_unfinished:
            what = (
                "holds an unfinished conversion or export: run the same ucp convert again to "
                "continue a conversion; remove the files of an export"
            )
        elif not store.exists(directory):
            what = "does not exist"
        elif not store.list(directory) and name not in store.sizes(parent):
            what = "is empty"
        else:
            what = (
                f"is in no known format (everstep, {', '.join(_FORMATS)}): give the folder of one "
                "checkpoint, or the one that holds its tags"
            )
        raise CheckpointNotFoundError(f"{directory} {what}", path=directory)
    reader: Any = import_module(f"{__package__}.{found[0]}.reader")
    from ucp_core.torch_files import reading_within

    with reading_within(memory_bytes):
        opened: Checkpoint = reader.read(store, directory, rules=rules, tag=tag)
    return opened


def _recognised(store: Store, directory: str) -> tuple[str, str] | None:
    """Return the package and the ``NAME`` of another framework's format."""
    for package in _FORMATS:
        module: Any = import_module(f"{__package__}.{package}.recognition")
        if module.recognise(store, directory):
            return package, module.NAME
    return None
