"""A script that runs alone: which checkpoint it resumes from, when it refuses, what it is told."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep import (
    CheckpointSettings,
    RunSettings,
    Session,
    Settings,
    StateError,
    TaskError,
    TrainSettings,
    run,
)
from tests.support.endless import endless
from ucp_core.errors import HeldError, SupersededError
from ucp_core.storage import claim, next_claim, open_store
from workers.errors import MisfitError


class Fit:
    """Fits a linear model, and notes the step that each call resumed from."""

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
        for step in session.steps(8):
            for samples in step.micro_batches():
                inputs = torch.ones(len(samples), self._width)
                step.backward(model(inputs).square().mean(), tokens=len(samples))
            step.apply()


def train(directory: Path, fit: Fit, *, steps: int) -> int:
    """Train to the end; return the last attempt."""
    settings = Settings(
        train=TrainSettings(steps=steps, global_batch=1, micro_batch=1, lr=0.01),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    run(fit, settings=settings, directory=str(directory))
    return int(json.loads((directory / "result.json").read_text())["attempt"])


def damage(directory: Path, step: int) -> None:
    (file,) = (directory / f"checkpoints/step-{step:08d}").glob("*.bin")
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_are_skipped_with_a_warning_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading finds damaged bytes; a short file is found before. Both steps are trained again.

    An attempt number that the files of a damaged version have would commit nothing there.
    """
    assert train(tmp_path, Fit(), steps=2) == 1
    assert train(tmp_path, Fit(), steps=3) == 2
    damage(tmp_path, 2)
    (file,) = (tmp_path / "checkpoints/step-00000003").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])

    again, after = Fit(), Fit()
    assert train(tmp_path, again, steps=3) >= 3
    told = [line for line in caplog.messages if line.startswith("skipped")]
    train(tmp_path, after, steps=3)

    assert again.resumed == [1]
    assert [line.split(": ")[0][-13:] for line in told] == ["step-00000003", "step-00000002"]
    assert "file a0002-r00000.bin has" in told[0]
    assert "0.bias (momentum_buffer): box" in told[1]
    assert after.resumed == [3]


def test_if_nothing_can_be_loaded_training_does_not_restart(tmp_path: Path) -> None:
    """It would overwrite checkpoints that a person may still restore."""
    train(tmp_path, Fit(), steps=2)
    damage(tmp_path, 1)
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{")

    with pytest.raises(
        StateError, match=r"step-00000002: .*step-00000001: .*to restart from step 0"
    ):
        train(tmp_path, Fit(), steps=2)


def test_without_manifests_training_does_not_restart_beside_the_data(tmp_path: Path) -> None:
    """A tool that copies a run may leave them out, or bring them last."""
    train(tmp_path, Fit(), steps=3)
    for manifest in (tmp_path / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    again = Fit()

    with pytest.raises(
        StateError, match=r"step-00000003: it has data and no manifest\.json; step-00000002: "
    ):
        train(tmp_path, again, steps=3)

    assert again.resumed == []
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_a_first_save_that_was_cut_off_holds_nothing_up(tmp_path: Path) -> None:
    """It looks like one whose manifest is gone; no user may be there to delete it."""
    train(tmp_path, Fit(), steps=1)
    (tmp_path / "checkpoints/step-00000001/manifest.json").unlink()
    again = Fit()

    assert train(tmp_path, again, steps=2) == 2
    assert again.resumed == [0]


def test_if_the_first_checkpoint_is_damaged_training_restarts_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That loses no more than one checkpoint interval, and no user may be there to ask."""
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
def test_another_model_is_refused_and_does_not_resume_from_an_older_version(
    tmp_path: Path, other: Fit, what: str
) -> None:
    """A checkpoint that does not fit looks like a damaged one to the loader."""
    train(tmp_path, Fit(depth=2), steps=2)

    with pytest.raises(MisfitError, match=f"step-00000002 is a checkpoint of another .*{what}"):
        train(tmp_path, other, steps=3)

    assert other.resumed == []
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_an_optimizer_that_lacks_its_state_is_refused(tmp_path: Path) -> None:
    """Plain SGD keeps no state; momentum would restart from zero in the middle of a run."""
    train(tmp_path, Fit(momentum=0.0), steps=1)

    with pytest.raises(StateError, match=r"it has no 0\.bias \(momentum_buffer\)"):
        train(tmp_path, Fit(), steps=2)


def test_a_network_error_of_the_script_is_reported_as_itself(tmp_path: Path) -> None:
    """With several workers it would count as a lost peer; a script alone has none."""

    def train(_session: Session) -> None:
        raise dist.DistNetworkError("the store of the script is away")

    with pytest.raises(TaskError, match="after step 0: DistNetworkError: the store of the script"):
        run(train, directory=str(tmp_path), steps=1)


def test_settings_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained in ./run."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        run=RunSettings(directory="named"),
        train=TrainSettings(steps=1, global_batch=4, micro_batch=4),
    )
    run(Fit(), settings=settings)
    assert [path.name for path in tmp_path.iterdir()] == ["named"]


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """Both trained, and wrote into one another. A forked process inherits what is open."""
    with endless(tmp_path) as other:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(
            HeldError, match=rf"another process trains in {tmp_path}: pid {other.pid}, host "
        ):
            train(tmp_path, Fit(), steps=2)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

        other.kill()
        other.wait()
        train(tmp_path, Fit(), steps=2)


def test_without_locks_the_process_that_began_later_trains() -> None:
    """A bucket cannot say whether the process of a claim lives."""
    store, path = open_store("memory://alone")
    fit = Fit()

    def train_until_another_begins(session: Session) -> None:
        claim(store, path, next_claim(store, path), {"token": "other", "host": "there"})
        fit(session)

    with pytest.raises(SupersededError, match=r"claim 2 was made at .* on there"):
        run(train_until_another_begins, directory="memory://alone", steps=2, global_batch=1,
            micro_batch=1)  # fmt: skip
    assert not store.list(f"{path}/checkpoints")


def test_a_resume_says_from_which_step_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who changes a script and starts it again expects a new run."""
    train(tmp_path, Fit(), steps=2)
    assert caplog.messages == []
    train(tmp_path, Fit(), steps=3)
    assert caplog.messages == [f"resumes at step 2 from {tmp_path}"]
    assert caplog.records[0].levelno >= logging.WARNING, "Python shows no less without a setup"
