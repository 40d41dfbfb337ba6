from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.config import load
from orchestrator.driver import init_config
from orchestrator.errors import ConfigError
from tests.support.run_directories import write_run


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_run_reads_what_init_wrote() -> None:
    """One command of a newcomer after the other, without a file to name."""
    written = CliRunner().invoke(app, ["init"])
    write_run(Path("runs/first"), steps=200)
    ran = CliRunner().invoke(app, ["run"])
    more = CliRunner().invoke(app, ["run", "train.steps=none"])
    again = CliRunner().invoke(app, ["init"])

    assert written.stdout == "wrote everstep.yaml; edit it, then: everstep run\n"
    assert json.loads(Path("everstep.schema.json").read_text())["title"] == "An everstep run"
    assert "the run in" in ran.stderr
    assert "all 200 steps are done" in ran.stderr
    assert "command line: train.steps: must be a valid integer" in more.stderr
    assert again.exit_code == 2
    assert "everstep.yaml is there already" in again.stderr


def test_without_a_configuration_run_says_how_to_get_one() -> None:
    ran = CliRunner().invoke(app, ["run"])

    assert ran.exit_code == 2
    assert "everstep.yaml does not exist; `everstep init` writes a new one" in ran.stderr


def test_the_arguments_of_a_script_are_taken_over() -> None:
    """Under everstep they do not count, so its learning rate would be another one."""
    Path("train.py").write_text(
        "from everstep import run\nSTEPS = 40\n\n"
        "def train(session): ...\n\n"
        "if __name__ == '__main__':\n"
        "    run(train, directory='runs/mine', steps=STEPS, global_batch=32, micro_batch=8,\n"
        "        lr=2e-4, seed=hash('x'), precision='bf16')\n"
    )

    init_config("train.py", "configs/train.yaml")
    config = load("configs/train.yaml")

    assert (config.run.script, config.run.name) == (str(Path("train.py").absolute()), "mine")
    train = config.train
    assert (train.steps, train.global_batch, train.micro_batch) == (40, 32, 8)
    assert (train.lr, train.seed, train.precision) == (2e-4, 0, "bf16")


@pytest.mark.parametrize("text", [None, "def train(:"])
def test_what_is_no_script_is_refused(text: str | None) -> None:
    if text is not None:
        Path("train.py").write_text(text)

    with pytest.raises(ConfigError, match=r"train\.py cannot be read as a script"):
        init_config("train.py", "everstep.yaml")
    assert not Path("everstep.yaml").exists()
