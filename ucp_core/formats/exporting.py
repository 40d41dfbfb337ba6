"""Exports any checkpoint: the writers by format, and their options."""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ucp_core.errors import UcpError
from ucp_core.native import claimed, reading
from ucp_core.storage import Store, is_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucp_core.geometry import TensorEntry
    from ucp_core.native import Checkpoint


#: The function that writes each format, and the format's options.
_WRITERS: dict[str, tuple[str, frozenset[str]]] = {
    "universal": ("conversion.run.convert", frozenset()),
    "huggingface": (
        "formats.huggingface.writer.write",
        frozenset({"dtype", "shard_bytes", "keep_tied"}),
    ),
    "dcp": ("formats.dcp.writer.write", frozenset({"model", "optimizer", "flatten_optimizer"})),
    "megatron-core": ("formats.megatron_core.writer.write", frozenset({"ep", "query_groups"})),
    "deepspeed": (
        "formats.deepspeed.writer.write",
        frozenset({"stage", "dp", "tp", "ep", "dtype", "rules", "tag"})
        | {"sub_group_size", "stages", "tied_layers"},
    ),
    "deepspeed-universal": (
        "formats.deepspeed.universal_writer.write",
        frozenset({"dtype", "rules", "tag"}),
    ),
}
#: Formats that hold only weights.
_WEIGHTS_ONLY = frozenset({"huggingface"})
#: Formats that hold only tensors of the model and its optimizer.
_MODEL_ONLY = frozenset({"deepspeed", "deepspeed-universal", "huggingface", "megatron-core"})
#: Prefixes and suffixes of the files beside Hugging Face's weights that hold no code.
_BESIDE_BEGINNINGS = (
    "added_tokens",
    "chat_template",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map",
    "tokenizer",
    "vocab",
)
_BESIDE_ENDS = (".json", ".txt", ".model", ".jinja")
#: Option of every format: whether all files must survive a loss of power before the commit.
_COMMON = frozenset({"fsync"})
#: Names of the formats.
FORMATS = tuple(_WRITERS)


def lies_beside(name: str) -> bool:
    """Return whether a name belongs to a configuration or tokenizer file, which hold no code."""
    return name.startswith(_BESIDE_BEGINNINGS) and name.endswith(_BESIDE_ENDS)


def export(
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    format: str,  # noqa: A002 - the word of the command line
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> None:
    """Write ``checkpoint`` as ``format``, and import only that format's writer.

    Args:
        checkpoint: The source, of any format.
        store: The storage to write to.
        directory: Must not hold a checkpoint.
        format: One of ``FORMATS``.
        memory_bytes: Limit for the buffers.
        progress: Called with the bytes written so far and the total.
        **options: Options of that format's writer, and ``fsync``: whether all files must survive a
            loss of power before the commit.

    Raises:
        UcpError: The format or the option is unknown, ``directory`` is in use, or the format cannot
            hold the state; nothing was written.
        CheckpointCorruptError: The source is damaged; nothing is left at the destination.
        StorageError: A storage refused.
    """
    if format not in _WRITERS:
        raise UcpError(f"{format!r} cannot be written: give one of {', '.join(FORMATS)}")
    name, own = _WRITERS[format]
    wrong = sorted(set(options) - own - _COMMON)
    if wrong:
        known = ", ".join(sorted(own | _COMMON))
        raise UcpError(f"{wrong[0]} is not an option of format {format}: it has {known}")
    refuse_inside(checkpoint, store, directory)
    module, _, function = name.rpartition(".")
    write = getattr(import_module(f"ucp_core.{module}"), function)
    # A conversion has a claim of its own, because a later command can continue it.
    held = nullcontext() if format == "universal" else claimed(store, directory)
    with reading(checkpoint), held:
        write(checkpoint, store, directory, memory_bytes=memory_bytes, progress=progress, **options)


def refuse_inside(checkpoint: Checkpoint, store: Store, directory: str) -> None:
    """Refuse a destination that is, or is inside, the source's folder or that of its tags."""
    source, target = checkpoint.given or checkpoint.directory, directory
    if is_local(store) and is_local(checkpoint.store):
        source, target = os.path.realpath(source), os.path.realpath(target)
    elif _service(store) != _service(checkpoint.store):
        return
    above = [target, *map(str, PurePosixPath(target).parents)]
    if source in above:
        what = "is the source itself" if source == target else f"is inside the source {source}"
        raise UcpError(f"{directory} {what}: give another destination", path=directory)


def _service(store: Store) -> object:
    """Return a value that is equal for stores of the same files."""
    below = getattr(store, "below", store)
    return getattr(below, "service", below)


def options_of(format: str) -> frozenset[str]:  # noqa: A002 - as above
    """Return the names of a format's own options."""
    return _WRITERS[format][1]


def warnings_of(
    checkpoint: Checkpoint,
    *,
    format: str,  # noqa: A002 - as above
    dtype: str | None = None,
) -> list[str]:
    """Return warnings for the user about an export to a format, perhaps cast to ``dtype``."""
    if format == "huggingface":
        from ucp_core.formats.huggingface import writer

        return list(writer.kept_in_float32(checkpoint, writer.dtype_of(dtype)).reasons)
    num_groups = len(checkpoint.param_groups)
    if format != "deepspeed-universal" or num_groups <= 1:
        return []
    told = (
        f"DeepSpeed itself restores {num_groups} optimizer groups wrongly under ZeRO-3: it gives "
        "them one step counter, and losses differ from the second step on. For ZeRO-3, export with "
        "--format deepspeed --stage 3"
    )
    return [told]


def exported(checkpoint: Checkpoint, *, format: str) -> list[TensorEntry]:  # noqa: A002 - as above
    """Return the tensors of the checkpoint that the format can hold."""
    roles = checkpoint.manifest.roles
    return [
        entry
        for key, entry in checkpoint.state_map.entries.items()
        if (key.slot == "weight" or format not in _WEIGHTS_ONLY)
        and (roles.get(key.fqn) != "extra" or format not in _MODEL_ONLY)
    ]


def left_behind(checkpoint: Checkpoint, *, format: str) -> list[str]:  # noqa: A002 - as above
    """Return the parts of the checkpoint that the format cannot hold, for people."""
    roles = checkpoint.manifest.roles
    found: list[str] = []
    if format in _MODEL_ONLY:
        found = [f"tensor {fqn}" for fqn in sorted(roles) if roles[fqn] == "extra"]
    if format not in _WEIGHTS_ONLY:
        return found
    slots = sorted({key.slot for key in checkpoint.state_map.entries} - {"weight"})
    values = sorted(name for name in checkpoint.extra if name != format)
    found += [f"state of the optimizer ({', '.join(slots)})"] if slots else []
    found += ["settings of the optimizer's groups"] if checkpoint.param_groups else []
    found += [f"values of the run ({', '.join(values)})"] if values else []
    return found
