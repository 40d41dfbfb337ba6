"""Decide which settings may change when a run resumes in its directory.

A run has one history. Its seed and global batch decide the samples of each step, and its committed
state belongs to one model, so these must stay the same. The cluster, the number of workers, the
number of steps and the learning rate may change each time.
"""

import json
from shlex import quote
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.driver.run import Run
from orchestrator.errors import ConfigError
from orchestrator.report import CONFIG
from ucp_core.native import find_committed, newest_finite
from ucp_core.storage import join
from workers.protocol import CHECKPOINTS, STOPPED
from workers.settings import IGNORE

#: Sections and keys that determine committed steps.
_FIXED = ("model.", "data.", "train.seed.", "train.global_batch.")
#: Keys in those sections that affect no step.
_FREE = frozenset({"data.cache_directory", "data.validation_samples"})
#: Keys that do not matter to a command that only attaches to the run.
ELSEWHERE = frozenset({"cluster.address", "cluster.local_nodes", "run.directory"})


def require_same(config: RunConfig) -> None:
    """Raise ``ConfigError`` if the settings of the live run differ from ``config``."""
    url = config.run.directory
    changes = _changes(Run(url).settings(), config)
    _refuse(
        f"the run in {url} is under way with other settings; stop it with `everstep stop "
        f"{quote(url)}` and run it again, or drop these changes:",
        [line for path, line in changes if path not in ELSEWHERE],
    )


def require_unfinished(config: RunConfig) -> None:
    """Raise ``ConfigError`` if nothing is left to train. Needs no cluster."""
    run = Run(config.run.directory)
    summary = run.summary()
    if summary is not None:
        steps = summary["steps"]
    elif run.store.exists(join(run.path, CONFIG)):
        return  # Its controller has not reported yet that it is over.
    else:
        # A script that ran alone writes no summary.
        found = find_committed(run.store, join(run.path, CHECKPOINTS), lineage=())
        steps = found.step if found is not None else 0
    what_is_over = _over(config, run, steps) if steps else ""
    _refuse(f"the run in {run.url} is over:", [what_is_over] if what_is_over else [])


def require_resumable(config: RunConfig) -> None:
    """Raise ``ConfigError`` if nothing is left to train, or a change breaks the history.

    A directory without a run, or with one that committed nothing, accepts every configuration.
    """
    require_unfinished(config)
    url = config.run.directory
    run = Run(url)
    if not run.store.exists(join(run.path, CONFIG)) or not run.saves():
        return
    _require_finite(config, run)
    _refuse(
        f"the run in {url} cannot resume from its last step with these changes; undo them, or name "
        "another run.directory:",
        [
            line
            for path, line in _changes(run.settings(), config)
            if f"{path}.".startswith(_FIXED) and path not in _FREE
        ],
    )


def _over(config: RunConfig, run: Run, steps: int) -> str:
    """Return why a run that ended after ``steps`` has nothing left to train; "" if it has."""
    otherwise = ", or name another run.directory"
    if steps >= config.train.steps:
        return f"train.steps: all {steps} steps are done; raise it to train on{otherwise}"
    path = join(run.path, STOPPED)
    stopped = json.loads(run.store.read(path)) if run.store.exists(path) else {}
    if stopped.get("step") != steps:
        return ""
    return (
        f"train.steps: the run is complete, the script stopped it after step {steps}: "
        f"{stopped['reason']}; delete {STOPPED} there to train on{otherwise}"
    )


def _require_finite(config: RunConfig, run: Run) -> None:
    """Raise if the run would resume from weights that are not finite without permission."""
    if config.run.resume_from == "finite" or config.train.not_finite.action == IGNORE:
        return
    checkpoints = join(run.path, CHECKPOINTS)
    newest, finite = newest_finite(run.store, checkpoints, lineage=run.state().lineage)
    if finite < newest:
        line = (
            f"run.resume_from: step {finite} is the newest version with finite weights; fix "
            "the cause, and add run.resume_from=finite to train on from there"
            if finite
            else "run.directory: no version there has finite weights; name another directory"
        )
        _refuse(f"the weights after step {newest} of {run.url} are not finite:", [line])


def _changes(then: RunConfig, now: RunConfig) -> list[tuple[str, str]]:
    """Return ``(section.key, line for people)`` of every setting that differs."""
    before, after = (flat(config.model_dump(mode="json")) for config in (then, now))
    return [
        (path, f"{path}: {value!r} here, {before[path]!r} in the run")
        for path, value in after.items()
        if value != before[path]
    ]


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by ``section.key``."""
    flat: dict[str, Any] = {}
    for section, values in document.items():
        keys = values.items() if isinstance(values, dict) else [("", values)]
        flat |= {f"{section}.{key}".rstrip("."): value for key, value in keys}
    return flat


def _refuse(what: str, lines: list[str]) -> None:
    """Raise ``ConfigError`` with the lines if there are any."""
    if lines:
        listing = "".join(f"\n  {line}" for line in lines)
        raise ConfigError(what + listing, problems=lines)
