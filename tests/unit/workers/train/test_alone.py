"""Training without anybody around it: which checkpoint it goes on from, and when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from workers.errors import StateError
from workers.protocol import Completed
from workers.settings import CheckpointSettings, Settings, TrainSettings
from workers.train import Session, run_alone


class Fit:
    """Fits a linear model, and notes from which step every call of it went on."""

    def __init__(self, *, width: int = 2, depth: int = 1, momentum: float = 0.9) -> None:
        self._width, self._depth, self._momentum = width, depth, momentum
        self.resumed: list[int] = []

    def build(self) -> nn.Module:
        layers = [nn.Linear(self._width, self._width) for _ in range(self._depth)]
        return nn.Sequential(*layers)

    def __call__(self, session: Session) -> None:
        model = session.model(self.build)
        session.optimizer(
            lambda parameters: torch.optim.SGD(parameters.values(), momentum=self._momentum)
        )
        self.resumed.append(session.step)
        for step in session.steps(num_samples=8):
            for samples in step.micro_batches():
                inputs = torch.ones(len(samples), self._width)
                step.backward(model(inputs).square().mean(), tokens=len(samples))
            step.apply()


def train(directory: Path, fit: Fit, *, steps: int) -> int:
    """Return the attempt that ended it."""
    settings = Settings(
        train=TrainSettings(steps=steps, global_batch=1, micro_batch=1, lr=0.01),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    outcome = run_alone(fit, settings, str(directory))
    assert isinstance(outcome, Completed), outcome
    return outcome.attempt


def damage(directory: Path, step: int) -> None:
    (file,) = (directory / f"checkpoints/step-{step:08d}").glob("*.bin")
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_are_passed_over_told_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged bytes show when they are loaded, a short file before; the steps come once more.

    An attempt number that files of a damaged version have would commit nothing there.
    """
    assert train(tmp_path, Fit(), steps=2) == 1
    assert train(tmp_path, Fit(), steps=3) == 2
    damage(tmp_path, 2)
    (file,) = (tmp_path / "checkpoints/step-00000003").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])

    again, after = Fit(), Fit()
    assert train(tmp_path, again, steps=3) >= 3
    told = [line for line in caplog.messages if line.startswith("passed over")]
    train(tmp_path, after, steps=3)

    assert again.resumed == [1]
    assert [line.split(": ")[0][-13:] for line in told] == ["step-00000003", "step-00000002"]
    assert "file a0002-r00000.bin has" in told[0]
    assert "0.bias (momentum_buffer): box" in told[1]
    assert after.resumed == [3]


def test_where_nothing_can_be_loaded_training_does_not_begin_anew(tmp_path: Path) -> None:
    """It would write over what a person may still bring back."""
    train(tmp_path, Fit(), steps=2)
    damage(tmp_path, 1)
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{")

    with pytest.raises(StateError, match=r"step-00000002: .*step-00000001: .*to begin anew"):
        train(tmp_path, Fit(), steps=2)


def test_without_the_first_checkpoint_training_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No more is lost than the interval puts at stake, and nobody may be there to be asked."""
    train(tmp_path, Fit(), steps=1)
    damage(tmp_path, 1)
    again = Fit()

    assert train(tmp_path, again, steps=1) >= 2

    assert again.resumed[-1] == 0
    assert any("damaged checkpoint step-00000001" in line for line in caplog.messages)
    after = Fit()
    train(tmp_path, after, steps=1)
    assert after.resumed == [1]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            Fit(width=3, depth=2),
            r"0\.bias \(momentum_buffer\) is F32\[2\] in it, needed is F32\[3\]",
        ),
        (Fit(depth=3), r"it has no 2\.bias \(weight\), needed is F32\[2\]"),
        (Fit(depth=1), r"it has 1\.bias \(weight\), which the model lacks"),
    ],
    ids=["wider", "deeper", "shallower"],
)
def test_another_model_is_refused_and_goes_on_from_no_older_version(
    tmp_path: Path, other: Fit, what: str
) -> None:
    """What does not fit looks like damage to whoever loads it, and is none."""
    train(tmp_path, Fit(depth=2), steps=2)

    with pytest.raises(StateError, match=f"step-00000002 is a checkpoint of another .*{what}"):
        train(tmp_path, other, steps=3)

    assert other.resumed == []
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_an_optimizer_that_lacks_its_state_is_refused(tmp_path: Path) -> None:
    """Plain SGD keeps nothing; with momentum it would begin at rest in the middle of a run."""
    train(tmp_path, Fit(momentum=0.0), steps=1)

    with pytest.raises(StateError, match=r"it has no 0\.bias \(momentum_buffer\)"):
        train(tmp_path, Fit(), steps=2)
