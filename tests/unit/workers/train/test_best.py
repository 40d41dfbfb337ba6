"""Checkpoints that are kept because a value was best, alone; ``tests/chaos`` kills workers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep import BestSettings, CheckpointSettings, Settings, TaskError, TrainSettings
from orchestrator.driver import export_run
from orchestrator.errors import RunNotFoundError
from workers.train.boundary.best import ranked

#: By step; the best is 3, then 5.
LOSSES = [9.0, 7.0, 2.0, 4.0, 3.0, 8.0, 2.0, 6.0]


def test_ranked_keeps_the_best_and_of_equal_ones_the_earlier() -> None:
    kept: tuple[tuple[int, float], ...] = ()
    for step, value in enumerate(LOSSES, 1):
        kept = ranked(kept, (step, value), mode="min", keep=3)
    assert kept == ((3, 2.0), (7, 2.0), (5, 3.0))
    assert ranked(kept, (9, 5.0), mode="max", keep=1) == ((9, 5.0),)


def _constant(value: torch.Tensor, _: Any) -> tuple[torch.Tensor, int]:
    return value, 1


def _run(
    directory: Path, best: BestSettings, *, steps: int = len(LOSSES), **script: Any
) -> list[list[int]]:
    """Train; return which checkpoint was the newest one when each step began."""
    seen: list[list[int]] = []

    def train(session: everstep.Session) -> None:
        model = session.model(lambda: torch.nn.Linear(2, 1))
        session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
        if script:
            session.keep_best(**script)
        for step in session.steps(4):
            seen.append(_stored(directory)[-1:])
            session.train_step(lambda samples: model(torch.ones(len(samples), 2)).square().mean())
            value = torch.tensor(LOSSES[step.number - 1])
            session.log({"accuracy": -value})
            session.evaluate(partial(_constant, value), 1)

    everstep.run(
        train,
        directory=str(directory),
        settings=Settings(
            train=TrainSettings(steps=steps, global_batch=4, micro_batch=4),
            checkpoint=CheckpointSettings(every_steps=100, keep=2, best=best),
        ),
    )
    return seen


def _stored(directory: Path) -> list[int]:
    found = directory.glob("checkpoints/*/manifest.json")
    return sorted(int(one.parent.name.removeprefix("step-")) for one in found)


@pytest.mark.parametrize(
    ("best", "script"),
    [
        (BestSettings(value="validation_loss"), {}),
        (BestSettings(value="accuracy", mode="max"), {}),
        (BestSettings(), {"value": "accuracy", "mode": "max"}),
    ],
    ids=["evaluated", "logged", "by the script"],
)
def test_the_best_is_kept_named_and_exported(
    tmp_path: Path, best: BestSettings, script: dict[str, Any]
) -> None:
    """Every 100 steps are stored: only the last one, and those that were the best."""
    run = tmp_path / "run"
    # Steps wait for those that are best.
    assert _run(run, best, steps=5, **script) == [[], [1], [2], [3], [3]]
    # 1, 2 and 3 were best; of them and 5 the two newest are kept: all newer ones, too.
    assert _stored(run) == [3, 5]
    _run(run, best, **script)
    assert _stored(run) == [3, 5, 8]

    value = 2.0 if best.value == "validation_loss" else -2.0
    name = best.value or script["value"]
    assert json.loads((run / "result.json").read_text())["best"] == {"step": 3, name: value}
    document = export_run(
        str(run), str(tmp_path / "to"), format="dcp", memory_bytes=64 << 20, best=True
    )
    assert document["step"] == 3


def test_without_a_best_step_an_export_says_how_to_get_one(tmp_path: Path) -> None:
    _run(tmp_path / "run", BestSettings())

    with pytest.raises(RunNotFoundError, match=r"keeps no best step yet: set checkpoint\.best"):
        export_run(
            str(tmp_path / "run"), str(tmp_path / "to"), format="dcp", memory_bytes=1, best=True
        )


def test_a_script_cannot_ask_for_another_best_than_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the configuration says checkpoint.best: \{value: valid"):
        _run(tmp_path / "run", BestSettings(value="validation_loss"), value="accuracy")
