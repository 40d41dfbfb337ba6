import json
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, load
from orchestrator.driver.changes import require_resumable, require_same, require_unfinished
from orchestrator.errors import ConfigError
from tests.support.checkpoints import save, save_not_finite, small_state
from ucp_core.storage import LocalStore


def _config(directory: Path, *overrides: str) -> RunConfig:
    text = f"run: {{directory: {directory}}}\nworkers: {{max: 2}}\ntrain: {{steps: 20}}\n"
    return load(text, overrides)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run directory with a committed step, as far as can be seen from outside."""
    (tmp_path / "checkpoints" / "step-00000008").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(_config(tmp_path).to_yaml())
    return tmp_path


@pytest.mark.parametrize(
    "override",
    ["train.steps=40", "workers.max=4", "train.lr=0.001", "data.validation_samples=8"],
)
def test_what_no_step_depends_on_may_change(directory: Path, override: str) -> None:
    """Other machines, another length: that is why a run is stopped and resumed."""
    require_resumable(_config(directory, override))


@pytest.mark.parametrize(
    "override",
    ["train.seed=1", "train.global_batch=32", "model.num_layers=3", "data.sequence_length=64"],
)
def test_what_the_history_depends_on_is_refused_by_name(directory: Path, override: str) -> None:
    """Samples would be seen twice and others never, and no metric would show it."""
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"{key}: {value} here, .* in the run"):
        require_resumable(_config(directory, override))


def test_a_run_that_committed_nothing_takes_every_setting(tmp_path: Path) -> None:
    """A user who mistyped the data path must not have to clean up by hand."""
    require_resumable(_config(tmp_path))
    (tmp_path / "config.yaml").write_text(_config(tmp_path).to_yaml())
    require_resumable(_config(tmp_path, "train.seed=1"))


def test_a_run_with_all_its_steps_is_over(directory: Path) -> None:
    """Training on is a wish of its own: another length."""
    (directory / "summary.json").write_text(json.dumps({"steps": 20}))

    with pytest.raises(ConfigError, match="all 20 steps are done; raise it"):
        require_resumable(_config(directory))
    require_resumable(_config(directory, "train.steps=21"))


def test_a_script_that_ran_alone_to_its_end_is_over(tmp_path: Path) -> None:
    """Its folder has neither settings nor a summary, and a cluster was started to do nothing."""
    save(LocalStore(), small_state(), step=20, root=str(tmp_path / "checkpoints"))

    with pytest.raises(ConfigError, match="all 20 steps are done; raise it"):
        require_unfinished(_config(tmp_path))
    require_unfinished(_config(tmp_path, "train.steps=21"))


def test_a_run_that_its_script_has_stopped_is_over(directory: Path) -> None:
    """It says why, and how to train on all the same."""
    (directory / "summary.json").write_text(json.dumps({"steps": 8}))
    told = {"step": 8, "attempt": 1, "reason": "no progress"}
    (directory / "stopped.json").write_text(json.dumps(told))

    with pytest.raises(ConfigError, match=r"is complete, .* after step 8: no progress; delete st"):
        require_resumable(_config(directory))
    # It was trained on since.
    (directory / "summary.json").write_text(json.dumps({"steps": 12}))
    require_resumable(_config(directory))


def test_a_run_that_is_under_way_cannot_be_given_other_settings(directory: Path) -> None:
    """They would be taken for granted and never come into force."""
    require_same(_config(directory, "cluster.local_nodes=3"))

    with pytest.raises(
        ConfigError, match=r"everstep stop .*\n  train.steps: 30 here, 20 in the run"
    ):
        require_same(_config(directory, "train.steps=30"))


def test_weights_that_are_not_finite_are_not_trained_on(tmp_path: Path) -> None:
    """Each step of it would be NaN. The newest finite version is offered."""
    store, root = LocalStore(), str(tmp_path / "checkpoints")
    for step in (10, 20):
        save(store, small_state(), step=step, root=root)
    save_not_finite(store, small_state(), step=30, sound_step=19, root=root)
    (tmp_path / "config.yaml").write_text(_config(tmp_path, "train.steps=50").to_yaml())

    with pytest.raises(ConfigError, match=r"after step 30 (?s:.*) step 10 is the newest version"):
        require_resumable(_config(tmp_path, "train.steps=50"))
    for override in ("run.resume_from=finite", "train.not_finite={action: ignore}"):
        require_resumable(_config(tmp_path, "train.steps=50", override))
