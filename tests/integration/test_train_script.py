"""The script interface: alone, in workers, unchanged, and close to plain torch."""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.attempts import curve, newest, wait_for_steps
from tests.support.forking import run_script
from tests.support.trainers import Run
from workers.protocol import Completed, Raised
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "train_script.py"


def run_python(directory: Path) -> str:
    """Run the script as a user does, in a Python that has imported nothing yet."""
    finished = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_plain_script_changes_in_at_most_ten_lines() -> None:
    """The promise is about what the user has to touch, so the two scripts are compared."""
    plain = (SUPPORT / "train_plain.py").read_text().splitlines()
    changed = difflib.ndiff(plain, SCRIPT.read_text().splitlines())

    new_lines = [line for line in changed if line.startswith("+ ")]

    assert 5 <= len(new_lines) <= 10


def test_a_script_runs_alone_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its second run finds the last step committed and has nothing left to do.

    A bias of its model is frozen: of that the optimizer kept nothing that could be loaded.
    """
    first = run_python(tmp_path)
    again = run_script(SCRIPT, tmp_path)

    lines = (tmp_path / "run/metrics/rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
    assert first in again
    assert 0.0 < float(first.split()[1]) < 0.1


def test_the_same_script_learns_the_same_in_several_workers(tmp_path: Path) -> None:
    """Alone it initialises the whole model; in workers each holds a part of it."""
    (tmp_path / "alone").mkdir()
    run_script(SCRIPT, tmp_path / "alone")
    alone = json.loads((tmp_path / "alone/run/result.json").read_text())
    settings = Settings(
        run=RunSettings(directory="run", script=str(SCRIPT)),
        train=TrainSettings(steps=60, global_batch=32, micro_batch=8, lr=0.02),
    )

    with Run(tmp_path) as run:
        outcomes = [left.outcome for left in run.train(settings, num_workers=3)]

    together = json.loads((tmp_path / "result.json").read_text())
    assert outcomes == [Completed(attempt=1, step=60)] * 3
    assert abs(together["final_loss"] - alone["final_loss"]) < 1e-5


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
