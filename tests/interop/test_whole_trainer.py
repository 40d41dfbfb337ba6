"""A fine-tuning as people write it, with Trainer and with ours: the same metrics, the same folder.

``tests/integration/cluster/test_whole_trainer.py`` runs it on workers that are killed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.attempts import finish, newest, wait_for_steps
from tests.support.trainers import Run
from workers.protocol import Yielded
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def check_alike(folder: Path, expected: Path, *, rel: float) -> None:
    """Check that the run behind ``folder`` came to what that behind ``expected`` came to."""
    found, wanted = results(folder), results(expected)
    for name in ("last", "generated"):
        assert found[name] == wanted[name]
    assert found["best"] == pytest.approx(wanted["best"], rel=rel)
    assert found["evaluated"] == pytest.approx(wanted["evaluated"], rel=rel)
    assert len(found["history"]) == len(wanted["history"])
    for line, other in zip(found["history"], wanted["history"], strict=True):
        assert line == pytest.approx(other, rel=rel)
    mine, theirs = (load_file(one / "model.safetensors") for one in (folder, expected))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].numpy() == pytest.approx(value.numpy(), rel=rel, abs=rel)
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).read_text() == (expected / name).read_text()
    assert (folder / "times.txt").read_text() == "once\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that Trainer exports."""
    from tests.support.ports import trainer_whole

    folder = tmp_path_factory.mktemp("plain")
    (folder / "out").mkdir()
    trainer_whole.main(transformers.Trainer, str(folder / "trainer"), str(folder / "out"))
    found = results(folder / "out")
    assert found["best"][0] < found["last"] < trainer_whole.STEPS, "it shows nothing"
    return folder / "out"


def test_alone_it_ends_as_with_trainer(tmp_path: Path, plain: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer
    from tests.support.ports import trainer_whole

    (tmp_path / "out").mkdir()
    trainer_whole.main(ElasticTrainer, str(tmp_path / "run"), str(tmp_path / "out"))

    check_alike(tmp_path / "out", plain, rel=1e-3)


def test_on_two_workers_it_ends_as_with_trainer(tmp_path: Path, plain: Path) -> None:
    """One leaves in the middle; what is behind ``train`` runs once, on rank 0."""
    from tests.support.ports import trainer_whole

    (tmp_path / "ours").mkdir()
    settings = Settings(
        run=RunSettings(
            directory="run",
            script=str(Path(trainer_whole.__file__)),
            # Steps of some length: it ends with the eighth, and is asked to leave before that.
            arguments=(str(tmp_path / "unused"), str(tmp_path / "ours"), "0.3"),
        ),
        train=TrainSettings(steps=trainer_whole.STEPS, global_batch=8, micro_batch=2),
        checkpoint=CheckpointSettings(every_steps=100, keep=2),
    )

    with Run(tmp_path) as run:
        members = run.begin(settings, num_workers=2)
        wait_for_steps(run, 3)
        members[1].yield_at_boundary(1)
        for trainer in members:
            assert isinstance(trainer.left().outcome, Yielded)
        finish(run, settings, num_workers=2, resume=newest(run))

    check_alike(tmp_path / "ours", plain, rel=1e-3)
