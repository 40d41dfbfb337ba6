"""Hugging Face's Trainer and ours, on the same script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.attempts import curve, newest, wait_for_steps
from tests.support.trainers import Run
from workers.errors import TaskError
from workers.settings import CheckpointSettings, Settings, TrainSettings

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

SCRIPT = Path(__file__).parents[1] / "support/ports/trainer_elastic.py"
STEPS = 12


def _trainer(kind: Any, directory: Path, **given: Any) -> Any:
    from tests.support.ports.trainer_elastic import make_trainer

    return make_trainer(kind, str(directory), max_steps=STEPS, **given)


def _history(trainer: Any) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    return [
        {key: value for key, value in line.items() if key in kept}
        for line in trainer.state.log_history
        if "train_runtime" not in line
    ]


@pytest.mark.parametrize("scheduler", ["linear", "cosine_with_restarts"])
def test_alone_it_learns_as_trainer_does(tmp_path: Path, scheduler: str) -> None:
    """Each step takes all samples, so that the order, which differs, does not count."""
    from everstep.integrations.transformers import ElasticTrainer

    runs = []
    for kind in (transformers.Trainer, ElasticTrainer):
        trainer = _trainer(kind, tmp_path / kind.__name__, lr_scheduler_type=scheduler)
        output = trainer.train()
        held = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        runs.append((_history(trainer), output, held, trainer.evaluate()["eval_loss"]))

    theirs, ours = runs
    assert len(theirs[0]) == len(ours[0])
    for line, expected in zip(ours[0], theirs[0], strict=True):
        # Theirs is a mean over batches, ours over tokens.
        assert line == pytest.approx(expected, rel=2e-3 if "eval_loss" in line else 2e-4)
    assert ours[1].global_step == theirs[1].global_step == STEPS
    assert ours[1].training_loss == pytest.approx(theirs[1].training_loss, rel=1e-4)
    for name, value in theirs[2].items():
        torch.testing.assert_close(ours[2][name], value, rtol=1e-3, atol=1e-4)
    assert ours[3] == pytest.approx(theirs[3], rel=1e-4)


def test_workers_may_change_in_the_middle(tmp_path: Path) -> None:
    """Scheduler, callbacks and log go on; the curve is that of one undisturbed worker."""
    settings = Settings(
        script=str(SCRIPT),
        arguments=(str(tmp_path / "output"),),
        train=TrainSettings(steps=STEPS, global_batch=8, micro_batch=2, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "undisturbed") as run:
        (left,) = run.train(settings, num_workers=1)
        assert not hasattr(left.outcome, "traceback"), left.outcome.traceback
    with Run(tmp_path / "disturbed") as run:
        members = run.begin(settings, num_workers=2)
        wait_for_steps(run, 4)
        members[1].yield_at_boundary(1)
        for trainer in members:
            trainer.left()
        run.train(settings, num_workers=1, resume=newest(run))

    assert curve(tmp_path / "disturbed") == curve(tmp_path / "undisturbed")


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    trainer = _trainer(
        ElasticTrainer, tmp_path, load_best_model_at_end=True, save_strategy="steps",
        eval_strategy="steps", save_steps=2, eval_steps=2,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {}
    with pytest.raises(TaskError, match=r"compute_metrics; args\.load_best_model_at_end") as raised:
        trainer.train()

    assert raised.value.facts["refused"] == ["compute_metrics", "args.load_best_model_at_end"]
