"""What may be changed when a run goes on in its directory, and what the next step depends on.

The history of a run is one: which samples a step has follows from the seed and the global batch,
and the state that is committed is that of one model. Another cluster, other sizes of the fleet,
another length or learning rate are the user's to choose anew each time.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.config import RunConfig, load
from orchestrator.errors import ConfigError
from orchestrator.run_directory import CHECKPOINTS, CONFIG, SUMMARY
from ucp_core.storage import join, open_store

#: Sections and keys that a history with committed steps depends on.
_FIXED = ("model", "data", "train.seed", "train.global_batch")
#: What is in those sections and changes no step.
_FREE = frozenset({"data.cache_directory", "data.validation_samples"})
#: Where a run is driven from does not matter to one that goes on.
_ELSEWHERE = frozenset({"cluster.address", "cluster.local_nodes", "run.directory"})


def require_same(config: RunConfig) -> None:
    """Raise ``ConfigError`` if the run that goes on has other settings than ``config``."""
    changed = [line for path, line in _changes(_last(config), config) if path not in _ELSEWHERE]
    if changed:
        _refuse(
            f"the run in {config.run.directory} goes on with other settings; end it by "
            f"`everstep stop {config.run.directory}` and run it again, or leave out what is new:",
            changed,
        )


def require_continuable(config: RunConfig) -> None:
    """Raise ``ConfigError`` if there is nothing left to train, or a change breaks the history.

    A directory without a run, or with one that committed nothing, takes every configuration.
    """
    store, path = open_store(config.run.directory)
    if not store.exists(join(path, CONFIG)):
        return
    if store.exists(join(path, SUMMARY)):
        steps = json.loads(store.read(join(path, SUMMARY)))["steps"]
        if steps >= config.train.steps:
            line = (
                f"train.steps: all {steps} steps are done; raise it to train on, or name another "
                "run.directory"
            )
            _refuse(f"the run in {config.run.directory} is over:", [line])
    if not store.list(join(path, CHECKPOINTS)):
        return
    broken = [line for path, line in _changes(_last(config), config) if _is_fixed(path)]
    if broken:
        _refuse(
            f"the run in {config.run.directory} cannot go on from its last step like this; put "
            "it back, or name another run.directory:",
            broken,
        )


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
        (path, f"{path}: {value!r} here, {before[path]!r} there")
        for path, value in after.items()
        if value != before[path]
    ]


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in document.items()
        for key, value in values.items()
    }


def _refuse(what: str, lines: list[str]) -> None:
    listing = "".join(f"\n  {line}" for line in lines)
    raise ConfigError(what + listing, problems=lines)
