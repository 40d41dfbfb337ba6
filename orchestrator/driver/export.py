"""``everstep export``: write the newest committed step of a run in another format."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from orchestrator.report import CONFIG
from ucp_core.errors import CheckpointNotFoundError, UcpError
from ucp_core.formats import export, left_behind, lies_beside, warnings_of
from ucp_core.geometry import TensorKey
from ucp_core.lineage import Lineage
from ucp_core.native import (
    AVERAGE,
    Checkpoint,
    best_steps,
    checkpoint_name,
    find_committed,
    open_checkpoint,
)
from ucp_core.storage import Store, join, open_store
from workers.protocol import BESIDE, CHECKPOINTS, METRICS

#: A run may commit a step and delete an older one during an export, but not this often in a row.
_TRIES_MAX: Final = 10
#: Length of the prefix in the names of averages.
_MARK: Final = len(AVERAGE)
_CONFIGURATION: Final = "config.json"
#: The configuration of ``peft``'s adapters, which names the base model.
_ADAPTERS: Final = "adapter_config.json"


class _WeightsFolder(NamedTuple):
    """A folder with Hugging Face files; ``url`` is "" for the run's own folder."""

    store: Store
    path: str
    url: str = ""

    def path_to(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return join(self.path, name)


def export_run(
    run_url: str,
    destination: str,
    *,
    format: str,  # noqa: A002 - the word of the command line
    memory_bytes: int,
    step: int | None = None,
    best: bool = False,
    average: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a committed step of the run in ``run_url`` as ``format``; return a summary.

    The run does not delete a step that is being exported. If the run deletes the newest step before
    the export begins, the next newest is used.

    Args:
        run_url: The directory of a run, or of a script that ran alone. It may still train.
        destination: Directory or URL that holds no checkpoint.
        format: One of ``ucp_core.formats.FORMATS``.
        memory_bytes: Limit for the buffers.
        step: Which step; None for the newest.
        best: Write the best step that the run keeps (``checkpoint.best``).
        average: Write the average of the weights (``Session.average``) in their place.

    Raises:
        RunNotFoundError: There is no run, no step in storage, or not the requested one.
        UcpError: As ``ucp_core.formats.export`` does.
    """
    store, checkpoints = (run := Run(run_url)).store, join(run.path, CHECKPOINTS)
    is_of_command = store.exists(join(run.path, CONFIG))
    _require_a_run(run, is_of_command=is_of_command)
    target_store, target = open_store(destination)
    folders = _folders(run, is_of_command=is_of_command)
    tries = 0
    while True:
        # The lineage grows with each attempt, and the newest step may belong to a later one by now.
        lineage = run.state().lineage if is_of_command else ()
        tries += 1
        try:
            if best:
                step = _best_step(store, checkpoints, lineage, run_url)
            checkpoint = _open(store, checkpoints, lineage, step, run_url)
            checkpoint = _averaged(checkpoint, run_url) if average else checkpoint
            if format == "huggingface":
                checkpoint = _with_configuration(checkpoint, folders)
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
            # The step was deleted after it was found.
            if tries == _TRIES_MAX:
                raise
    copied: list[str] = []
    for folder in folders if format == "huggingface" else ():
        copied += _copy_beside(folder, target_store, target)
    return {
        "checkpoint": destination,
        "format": format,
        "step": checkpoint.step,
        "copied": sorted(set(copied)),
        "left_behind": left_behind(checkpoint, format=format),
        "warnings": warnings_of(checkpoint, format=format, dtype=options.get("dtype")),
    }


def _require_a_run(run: Run, *, is_of_command: bool) -> None:
    # A script that runs alone writes no configuration.
    beside = {CHECKPOINTS, METRICS.partition("/")[0]}
    if not is_of_command and beside.isdisjoint(run.store.list(run.path)):
        raise RunNotFoundError(
            f"{run.url} holds no run: neither {CONFIG} nor {' nor '.join(sorted(beside))} is "
            "there; name the run directory of `everstep run`, or that of your script",
            url=run.url,
        )


def _folders(run: Run, *, is_of_command: bool) -> list[_WeightsFolder]:
    """Return the folders where the run's workers, and earlier runs, put files beside weights."""
    folders = [_WeightsFolder(run.store, join(run.path, BESIDE))]
    if is_of_command:
        config = run.settings()
        beside = ("" if config.run.script else config.model.folder) or config.run.init_from
        with suppress(UcpError):
            folders += [_WeightsFolder(*open_store(beside), beside)] if beside else []
    return folders


def _best_step(store: Store, checkpoints: str, lineage: Lineage, run_url: str) -> int:
    found = find_committed(store, checkpoints, lineage=lineage)
    steps = best_steps(found.checkpoint) if found is not None else []
    if not steps:
        raise RunNotFoundError(
            f"{run_url} keeps no best step yet: set checkpoint.best (value: validation_loss), "
            "and evaluate in the body of a step",
            url=run_url,
        )
    return steps[0]


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


def _averaged(checkpoint: Checkpoint, run_url: str) -> Checkpoint:
    """Return the checkpoint with the average of each weight in its place."""
    manifest = checkpoint.manifest
    entries = {k: e for k, e in checkpoint.state_map.entries.items() if k.fqn[:_MARK] != AVERAGE}
    averages = {
        TensorKey(key.fqn[_MARK:], key.slot): entry
        for key, entry in checkpoint.state_map.entries.items()
        if key.fqn[:_MARK] == AVERAGE
    }
    if not averages:
        raise RunNotFoundError(
            f"step {checkpoint.step} of {run_url} has no average of the weights: call "
            "session.average(decay=0.999) in the script, or export without --average",
            url=run_url,
        )
    entries |= {key: replace(entry, key=key) for key, entry in averages.items()}
    manifest = replace(
        manifest,
        state_map=replace(manifest.state_map, entries=dict(sorted(entries.items()))),
        roles={name: role for name, role in manifest.roles.items() if name[:_MARK] != AVERAGE},
    )
    return replace(checkpoint, manifest=manifest)


def _with_configuration(checkpoint: Checkpoint, folders: Sequence[_WeightsFolder]) -> Checkpoint:
    """Return the checkpoint with the configuration of its model, from the first folder with one.

    The writer puts the dtype of the weights into it, because transformers casts to that dtype.
    Adapters name the model in the last folder, from which the run started.
    """
    documents = dict(checkpoint.manifest.extra.get("huggingface", {}))
    for folder in folders:
        try:
            documents[_CONFIGURATION] = json.loads(
                folder.store.read(folder.path_to(_CONFIGURATION))
            )
        except (UcpError, ValueError):
            continue
        break
    else:
        return checkpoint
    if _ADAPTERS in documents and folders[-1].url:
        documents[_ADAPTERS] |= {"base_model_name_or_path": folders[-1].url}
    extra = {**checkpoint.manifest.extra, "huggingface": documents}
    return replace(checkpoint, manifest=replace(checkpoint.manifest, extra=extra))


def _copy_beside(folder: _WeightsFolder, store: Store, directory: str) -> list[str]:
    """Copy the other files, such as the tokenizer, that do not exist there yet.

    Return the names of all files that are from ``folder``.
    """
    copied: list[str] = []
    try:
        for name in filter(lies_beside, folder.store.list(folder.path)):
            if not store.exists(join(directory, name)):
                data = folder.store.read(folder.path_to(name))
                store.write_atomic(join(directory, name), data, fsync=False)
                copied.append(name)
            elif name == _CONFIGURATION:
                copied.append(name)
    except UcpError:
        # The weights are already written. The run's origin may be gone, or be a single file.
        pass
    return copied
