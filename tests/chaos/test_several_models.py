"""A GAN with an average and a frozen teacher, while workers leave, die and join."""

import json
from pathlib import Path

from tests.support import train_gan
from tests.support.attempts import curve, newest, wait_for_steps
from tests.support.trainers import Run
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings


def test_several_models_have_the_same_curve_whoever_trains_them(tmp_path: Path) -> None:
    """Each optimizer has its own count of steps, and some have none yet when a worker leaves."""
    settings = Settings(
        run=RunSettings(directory="run", script=str(Path(train_gan.__file__))),
        train=TrainSettings(steps=40, global_batch=8, micro_batch=2, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "undisturbed") as run:
        run.train(settings, num_workers=1)

    with Run(tmp_path / "disturbed") as run:
        members = run.begin(settings, num_workers=3)
        wait_for_steps(run, 2)
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
    results = [json.loads((tmp_path / name / "result.json").read_text())["weights_digest"]
               for name in ("undisturbed", "disturbed")]  # fmt: skip
    assert results[0] == results[1]
