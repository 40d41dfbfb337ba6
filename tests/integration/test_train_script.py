"""Scripts in workers: a missing call of `run`, and the state that a script registers."""

import json
from pathlib import Path

import pytest

from tests.support.attempts import curve, newest, wait_for_steps
from tests.support.trainers import Run
from workers.protocol import Raised
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_script_that_never_calls_run_gets_an_error(tmp_path: Path) -> None:
    """Nothing else would show: the script itself ends well."""
    (tmp_path / "idle.py").write_text("x = 1\n")

    with Run(tmp_path) as run:
        settings = Settings(run=RunSettings(directory="run", script=str(tmp_path / "idle.py")))
        (left,) = run.train(settings, num_workers=1)

    assert isinstance(left.outcome, Raised)
    assert "idle.py ended without calling everstep.run" in left.outcome.error


def test_registered_state_goes_with_the_run_to_other_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler and an average, through a change of three workers to two and a death.

    So do buffers: BatchNorm's statistics, which are averaged, and the vectors of ``spectral_norm``.
    The data is read ahead by processes of the workers.
    """
    train = TrainSettings(steps=40, global_batch=8, micro_batch=2, deterministic=True)
    settings = Settings(
        run=RunSettings(directory="run", script=str(SUPPORT / "train_scheduled.py")),
        train=train,
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "undisturbed") as run:
        run.train(settings, num_workers=1)
    expected = sorted(set(_averages(capfd)))

    with Run(tmp_path / "disturbed") as run:
        members = run.begin(settings, num_workers=3)
        wait_for_steps(run, 5)
        members[1].yield_at_boundary(1)
        for trainer in members:
            trainer.left()
        members = run.begin(settings, num_workers=2, resume=newest(run))
        wait_for_steps(run, newest(run)[0] + 5)
        members[1].process.kill()
        members[1].process.join()
        members[0].fence(2)
        members[0].left()
        run.train(settings, num_workers=1, members=(2,), resume=newest(run))

    assert curve(tmp_path / "disturbed") == curve(tmp_path / "undisturbed")
    assert sorted(set(_averages(capfd))) == expected
    results = [json.loads((tmp_path / name / "result.json").read_text())["weights_digest"]
               for name in ("undisturbed", "disturbed")]  # fmt: skip
    assert results[0] == results[1]


def _averages(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("average ")]
