import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.config import load
from orchestrator.driver import init_config, settings_of_script
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
    assert "everstep.yaml already exists" in again.stderr


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


def test_what_no_literal_says_is_left_to_the_script() -> None:
    """200 steps of the new configuration would win over the script's own."""
    Path("train.py").write_text(
        "import os\nfrom everstep import run\n"
        "if __name__ == '__main__':\n"
        "    run(None, directory='runs/mine', steps=len(os.sep) + 6, global_batch=8, lr=2e-4)\n"
    )
    said: list[str] = []

    init_config("train.py", "everstep.yaml")
    text = Path("everstep.yaml").read_text()
    config = load("everstep.yaml", ask=partial(settings_of_script, say=said.append))
    fixed = load("everstep.yaml", ["train.steps=9"], ask=partial(settings_of_script, say=print))

    assert "  # Left out: the script's own argument decides.\n  #steps: 200\n" in text
    assert (config.train.steps, config.train.global_batch, config.train.lr) == (7, 8, 2e-4)
    assert said == ["train.py decides what the configuration leaves out: train.steps=7"]
    assert fixed.train.steps == 9


def test_the_arguments_of_trainer_decide() -> None:
    """384 steps were asked, and 200 trained. Each worker has a part of a batch that is one's."""
    Path("train.py").write_text(
        "from transformers import TrainingArguments\n"
        "from everstep.integrations.transformers import ElasticTrainer\n"
        "from tests.support.ports.trainer_elastic import make_trainer\n"
        "if __name__ == '__main__':\n"
        "    TrainingArguments(output_dir='runs/mine', use_cpu=True)\n"
        "    make_trainer(ElasticTrainer, 'runs/mine', num_train_epochs=2, max_grad_norm=0.5,\n"
        "        per_device_train_batch_size=4, gradient_accumulation_steps=1).train()\n"
    )

    init_config("train.py", "everstep.yaml")
    config = load(
        "everstep.yaml", ["train.seed=3"], ask=partial(settings_of_script, say=lambda _: None)
    )

    train = config.train
    assert config.run.name == "mine"
    assert (train.steps, train.global_batch, train.micro_batch) == (4, 4, 2)
    assert (train.clip_norm, train.seed, config.data.seed) == (0.5, 3, 42)


def test_a_script_that_fails_says_why_and_what_to_set() -> None:
    Path("train.py").write_text("raise RuntimeError('no such model')\n")
    Path("run.yaml").write_text(
        "run: {directory: runs/a, script: train.py}\nworkers: {max: 1}\ntrain: {steps: 4}\n"
    )

    with pytest.raises(ConfigError, match=r"set these keys[\s\S]*RuntimeError: no such model"):
        load("run.yaml", ask=partial(settings_of_script, say=print))


@pytest.mark.parametrize("text", [None, "def train(:"])
def test_what_is_no_script_is_refused(text: str | None) -> None:
    if text is not None:
        Path("train.py").write_text(text)

    with pytest.raises(ConfigError, match=r"train\.py cannot be read as a script"):
        init_config("train.py", "everstep.yaml")
    assert not Path("everstep.yaml").exists()
