"""``everstep export``: the newest committed step of a run, in another format, while it trains."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from orchestrator.run_directory import CHECKPOINTS, CONFIG
from ucp_core.errors import CheckpointNotFoundError, UcpError
from ucp_core.formats import export, left_behind
from ucp_core.lineage import Lineage
from ucp_core.native import Checkpoint, checkpoint_name, find_committed, open_checkpoint
from ucp_core.storage import Store, join, open_store

#: A run may commit a step and delete an older one while this looks; not so often in a row.
_TRIES_MAX: Final = 10
_CONFIGURATION: Final = "config.json"
#: The configuration of ``peft``'s adapters; it says where the base model is.
_ADAPTERS: Final = "adapter_config.json"
#: Beginnings and ends of the files that Hugging Face keeps beside weights.
_HUB_BEGINNINGS: Final = (
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
_HUB_ENDS: Final = (".json", ".txt", ".model", ".jinja")


def export_run(
    run_url: str,
    destination: str,
    *,
    format: str,  # noqa: A002 - the word of the command line
    memory_bytes: int,
    step: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a committed step of the run in ``run_url`` as ``format``; return what was written.

    The run does not delete a step that is being exported. If it has deleted the newest one that
    was found before the export began, the next newest is taken.

    Args:
        run_url: The run directory; the run may train, be over, or have run without the command.
        destination: Directory or URL that holds no checkpoint.
        format: One of ``ucp_core.formats.FORMATS``.
        memory_bytes: Limit for the buffers.
        step: Which step; None for the newest.

    Raises:
        RunNotFoundError: No step is committed to storage there, or not that one.
        UcpError: As ``ucp_core.formats.export`` does.
    """
    run = Run(run_url)
    store, checkpoints = run.store, join(run.path, CHECKPOINTS)
    is_of_command = store.exists(join(run.path, CONFIG))
    target_store, target = open_store(destination)
    # The folder of Hugging Face that the run's model is from; "" for none.
    beside = ""
    if is_of_command:
        config = run.settings()
        beside = ("" if config.run.script else config.model.folder) or config.run.init_from
    tries = 0
    while True:
        # The lineage grows with the attempts: what is newest may be of a later one by now.
        lineage = run.state().lineage if is_of_command else ()
        tries += 1
        try:
            checkpoint = _open(store, checkpoints, lineage, step, run_url)
            if format == "huggingface":
                checkpoint = _with_configuration(checkpoint, beside)
            export(
                checkpoint,
                target_store,
                target,
                format=format,
                memory_bytes=memory_bytes,
                **options,
            )
            break
        except (CheckpointNotFoundError, RunNotFoundError):
            # It was deleted after it was found, or between a listing and a look at it.
            if tries == _TRIES_MAX:
                raise
    copied = _copy_beside(beside, target_store, target) if format == "huggingface" else []
    return {
        "checkpoint": destination,
        "format": format,
        "step": checkpoint.step,
        "copied": copied,
        "left_behind": left_behind(checkpoint, format=format),
    }


def _open(
    store: Store, checkpoints: str, lineage: Lineage, step: int | None, run_url: str
) -> Checkpoint:
    if step is None:
        found = find_committed(store, checkpoints, lineage=lineage)
        if found is None:
            raise RunNotFoundError(
                f"{run_url} has no step in storage yet: wait for the first checkpoint "
                "(checkpoint.every_steps)",
                url=run_url,
            )
        return found.checkpoint
    directory = join(checkpoints, checkpoint_name(step))
    try:
        return open_checkpoint(store, directory)
    except CheckpointNotFoundError as error:
        there = ", ".join(name.removeprefix("step-") for name in store.list(checkpoints))
        raise RunNotFoundError(
            f"{run_url} has no step {step} in storage; it has {there or 'none'}", url=run_url
        ) from error


def _with_configuration(checkpoint: Checkpoint, beside: str) -> Checkpoint:
    """Return the checkpoint with the configuration of the model that the run started from.

    The writer sets the dtype of the weights in it, to which transformers casts on loading. Adapters
    say that they are for that model.
    """
    if not beside:
        return checkpoint
    try:
        source, path = open_store(beside)
        config = json.loads(source.read(join(path, _CONFIGURATION)))
    except (UcpError, ValueError):
        return checkpoint
    documents = {**checkpoint.manifest.extra.get("huggingface", {}), _CONFIGURATION: config}
    if _ADAPTERS in documents:
        documents[_ADAPTERS] = {**documents[_ADAPTERS], "base_model_name_or_path": beside}
    extra = {**checkpoint.manifest.extra, "huggingface": documents}
    return replace(checkpoint, manifest=replace(checkpoint.manifest, extra=extra))


def _copy_beside(beside: str, store: Store, directory: str) -> list[str]:
    """Copy what else lies beside the weights that the run started from, such as the tokenizer.

    Return the names of all that comes from there.
    """
    if not beside:
        return []
    copied: list[str] = []
    try:
        source, path = open_store(beside)
        for name in source.list(path):
            if name == _CONFIGURATION and store.exists(join(directory, name)):
                copied.append(name)
            is_wanted = name.startswith(_HUB_BEGINNINGS) and name.endswith(_HUB_ENDS)
            if is_wanted and not store.exists(join(directory, name)):
                data = source.read(join(path, name))
                store.write_atomic(join(directory, name), data, fsync=False)
                copied.append(name)
    except UcpError:
        # The weights are there. Where the run came from may be gone, or is one file.
        return copied
    return copied
