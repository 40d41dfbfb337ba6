"""Which settings may change when a run resumes in its directory.

A run has one history. Its seed and global batch decide which samples a step has, and its
committed state belongs to one model, so these stay. The cluster, the number of workers, the length
and the learning rate may change each time.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.config import RunConfig, load
from orchestrator.driver.status import RunFiles
from orchestrator.errors import ConfigError
from orchestrator.run_directory import CHECKPOINTS, CONFIG, SUMMARY
from ucp_core.native import newest_finite
from ucp_core.storage import Store, join, open_store
from workers.protocol import STOPPED
from workers.settings import IGNORE

#: Sections and keys that a history with committed steps depends on.
_FIXED = ("model", "data", "train.seed", "train.global_batch")
#: Keys in those sections that change no step.
_FREE = frozenset({"data.cache_directory", "data.validation_samples"})
#: Keys that do not matter to a command that only attaches to the run.
_ELSEWHERE = frozenset({"cluster.address", "cluster.local_nodes", "run.directory"})


def require_same(config: RunConfig) -> None:
    """Raise ``ConfigError`` if the run that is under way has other settings than ``config``."""
    changed = [line for path, line in _changes(_last(config), config) if path not in _ELSEWHERE]
    if changed:
        _refuse(
            f"the run in {config.run.directory} is under way with other settings; stop it with "
            f"`everstep stop {config.run.directory}` and run it again, or drop these changes:",
            changed,
        )


def require_resumable(config: RunConfig) -> None:
    """Raise ``ConfigError`` if there is nothing left to train, or a change breaks the history.

    A directory without a run, or with a run that committed nothing, takes every configuration.
    """
    store, path = open_store(config.run.directory)
    if not store.exists(join(path, CONFIG)):
        return
    if store.exists(join(path, SUMMARY)):
        steps = json.loads(store.read(join(path, SUMMARY)))["steps"]
        stopped = _stopped(store, path)
        line = ""
        if steps >= config.train.steps:
            line = f"train.steps: all {steps} steps are done; raise it to train on"
        elif stopped.get("step") == steps:
            line = (
                f"train.steps: it is complete, the script stopped it behind step {steps}: "
                f"{stopped['reason']}; delete {STOPPED} there to train on"
            )
        if line:
            line += ", or name another run.directory"
            _refuse(f"the run in {config.run.directory} is over:", [line])
    if not store.list(join(path, CHECKPOINTS)):
        return
    _require_finite(config, store, join(path, CHECKPOINTS))
    broken = [line for path, line in _changes(_last(config), config) if _is_fixed(path)]
    if broken:
        _refuse(
            f"the run in {config.run.directory} cannot resume from its last step with these "
            "changes; undo them, or name another run.directory:",
            broken,
        )


def _stopped(store: Store, path: str) -> dict[str, Any]:
    """Return the version with which a script ended its run; {} if none did."""
    path = join(path, STOPPED)
    found: dict[str, Any] = json.loads(store.read(path)) if store.exists(path) else {}
    return found


def _require_finite(config: RunConfig, store: Store, checkpoints: str) -> None:
    """Raise if weights that are not finite would be trained on, unless the user says so."""
    if config.run.resume_from == "finite" or config.train.not_finite.action == IGNORE:
        return
    lineage = RunFiles(config.run.directory).state().lineage
    newest, finite = newest_finite(store, checkpoints, lineage=lineage)
    if finite < newest:
        line = (
            f"run.resume_from: step {finite} is the newest version with finite weights; mend what "
            "went wrong, and add run.resume_from=finite to train on from there"
            if finite
            else "run.directory: no version there has finite weights; name another one"
        )
        what = f"the weights behind step {newest} of {config.run.directory} are not finite:"
        _refuse(what, [line])


def _last(config: RunConfig) -> RunConfig:
    store, path = open_store(config.run.directory)
    return load(store.read(join(path, CONFIG)).decode())


def _is_fixed(path: str) -> bool:
    return path not in _FREE and any(
        path == fixed or path.startswith(f"{fixed}.") for fixed in _FIXED
    )


def _changes(then: RunConfig, now: RunConfig) -> list[tuple[str, str]]:
    """Return ``(section.key, line for people)`` of every setting that differs."""
    before, after = (_flat(config.model_dump(mode="json")) for config in (then, now))
    return [
        (path, f"{path}: {value!r} here, {before[path]!r} in the run")
        for path, value in after.items()
        if value != before[path]
    ]


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in document.items():
        keys = values.items() if isinstance(values, dict) else [("", values)]
        flat |= {f"{section}.{key}".rstrip("."): value for key, value in keys}
    return flat


def _refuse(what: str, lines: list[str]) -> None:
    listing = "".join(f"\n  {line}" for line in lines)
    raise ConfigError(what + listing, problems=lines)
