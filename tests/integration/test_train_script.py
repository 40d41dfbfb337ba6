"""The state of scripts goes with a run to other workers, with nothing lost on the way."""

import json
from pathlib import Path

import pytest

from tests.support.attempts import curve, newest, of_script, wait_for_steps
from tests.support.trainers import Run

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize(
    ("script", "first_steps"),
    [
        pytest.param("train_scheduled.py", 5, id="registered state"),
        # Some optimizers have no step yet when a worker leaves.
        pytest.param("train_gan.py", 2, id="several models", marks=pytest.mark.chaos),
    ],
)
def test_the_state_of_a_script_goes_with_the_run_to_other_workers(
    script: str, first_steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler and an average, through a change of three workers to two and a death.

    So do buffers: BatchNorm's statistics, which are averaged, and the vectors of ``spectral_norm``.
    The data is read ahead by processes of the workers. A GAN has several models and optimizers,
    each with its own count of steps, an average and a frozen teacher.
    """
    settings = of_script(
        SUPPORT / script, steps=40, global_batch=8, micro_batch=2, deterministic=True
    )

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "undisturbed") as run:
        run.train(settings, num_workers=1)
    expected = sorted(set(_averages(capfd)))

    with Run(tmp_path / "disturbed") as run:
        members = run.begin(settings, num_workers=3)
        wait_for_steps(run, first_steps)
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
