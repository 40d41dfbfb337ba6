"""The work of a worker before it reports that it is ready."""

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.made import assignment_of
from tests.support.ranks import Place, running
from workers.process.runner import AttemptRunner
from workers.process.warm_up import import_for, warm_up
from workers.protocol import Completed, Outcome, Raised
from workers.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    Settings,
    TrainSettings,
)

LAZY = """
import importlib


def __getattr__(name):
    return importlib.import_module(f"heavy_package.{name}")
"""


def test_what_a_script_imports_is_there_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own modules are not: they may look at arguments that they do not have yet."""
    packages = tmp_path / "site-packages"
    (packages / "heavy_package").mkdir(parents=True)
    (packages / "heavy_package/__init__.py").write_text(LAZY)
    (packages / "heavy_package/model.py").write_text("")
    (packages / "broken_package.py").write_text("raise RuntimeError")
    (tmp_path / "own_module.py").write_text("raise SystemExit(2)")
    script = tmp_path / "train.py"
    script.write_text(
        "import broken_package, own_module, no_such_package\n"
        "from . import nothing\n"
        "from heavy_package import model, no_such_name\n"
    )
    for folder in (packages, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    import_for(str(script))

    assert "heavy_package.model" in sys.modules
    assert "own_module" not in sys.modules


@pytest.mark.parametrize("text", [None, "def train(:", "\0"])
def test_a_script_that_cannot_be_read_is_left_to_the_attempt(
    tmp_path: Path, text: str | None
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)

    import_for(str(script))


def _write_tokenizer(path: Path, num_words: int) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"w{n}": n for n in range(2, num_words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.save(str(path))


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"init_from": "no/such/checkpoint"}},
        {"run": {"init_from": "no/such", "init_state": "all", "init_missing": ("*",)}},
        {"run": {"init_from": "no/such", "script": "no_such_script.py"}},
        {"data": DataSettings(source="no/such/*.txt")},
        {"data": DataSettings(tokenizer="{tmp}/tokenizer.json"), "model": "125m"},
        {"data": DataSettings(sequence_length=1_000_000)},
        {"data": DataSettings(validation_samples=10_000), "model": "hf:no/such/folder"},
        {"train": TrainSettings(global_batch=100_000, micro_batch=100_000)},
        {"train": TrainSettings(precision="bf16", deterministic=True, validation_every=1)},
        {"checkpoint": CheckpointSettings(every_steps="auto", keep=1)},
        {"parallel": ParallelSettings(collective_timeout_s=0.001)},
    ],
    ids=["init", "init all", "init of a script", "no data", "tokenizer", "long sequences", "folder",
         "large batch", "precision", "checkpoint", "timeout"],
)  # fmt: skip
def test_the_warm_up_needs_nothing_of_what_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """It trains a model of its own: what is wrong with the run's, the attempt says.

    A worker that dies in its warm-up says nothing to anybody; the run waits for workers.
    """
    monkeypatch.chdir(tmp_path)
    data = changed.get("data")
    if data is not None and data.tokenizer:
        _write_tokenizer(tmp_path / "tokenizer.json", 1000)
        changed = changed | {"data": replace(data, tokenizer=str(tmp_path / "tokenizer.json"))}
    if "run" in changed:
        changed = {"run": RunSettings(directory="run", **changed["run"])}
    if "model" in changed:
        changed = changed | {"model": ModelSettings(preset=changed["model"])}

    warm_up(Settings(**changed))


SCRIPT = """
from pathlib import Path
import torch
from everstep import run

print("reads its data", flush=True)
with Path("{notes}").open("a") as notes:
    notes.write("read ")
{then}

def train(session):
    with Path("{notes}").open("a") as notes:
        notes.write("trains ")
    model = session.model(lambda: torch.nn.Linear(2, 2))
    session.optimizer(lambda named: torch.optim.SGD(named.values()))
    for _ in session.steps(4):
        session.train_step(lambda indices: model(torch.ones(len(indices), 2)).square().mean())

if __name__ == "__main__":
    run(train)
"""


def _train_twice(place: Place, *, script: str) -> list[Outcome]:
    """Be a worker that reads its script before it has an attempt."""
    settings = Settings(
        run=RunSettings(directory="run", script=script),
        train=TrainSettings(steps=1, global_batch=2),
    )
    runner = AttemptRunner(
        worker="w0001",
        directory=place.directory,
        run_url=str(place.directory / "run"),
        settings=settings,
    )
    runner.run_top_level()
    with place.directory.joinpath("notes").open("a") as notes:
        notes.write("ready ")
    return [
        runner.run(
            assignment_of(attempt=attempt, store_port=place.port),
            (),
        )
        for attempt in (1, 2)
    ]


@pytest.mark.parametrize(
    ("then", "expected", "kind"),
    [
        ("", "read ready trains trains ", Completed),
        ("raise ValueError('no data')", "read ready read read ", Raised),
    ],
)
def test_the_top_level_of_a_script_runs_before_a_worker_is_ready(
    tmp_path: Path, then: str, expected: str, kind: type[Outcome]
) -> None:
    """Else the others of an attempt wait for its data; and what it prints is not lost.

    A script that fails there fails in the attempt, where the run learns of it.
    """
    script, notes = tmp_path / "train.py", tmp_path / "notes"
    script.write_text(SCRIPT.format(notes=notes, then=then))

    with running(functools.partial(_train_twice, script=str(script)), 1, tmp_path) as ranks:
        (outcomes,) = ranks.results()

    assert [type(outcome) for outcome in outcomes] == [kind, kind], outcomes
    assert notes.read_text() == expected
    log = (tmp_path / "run/logs/attempt-0001/rank0.log").read_text()
    assert log.count("reads its data") == 1
