"""Real services, on files: a run that is cut and resumed has one curve in each."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig, load
from orchestrator.report import LOGGERS
from orchestrator.shell.loggers import Loggers
from tests.support.logged import in_tensorboard, in_wandb
from ucp_core.storage import Owner, claim, open_store
from workers.protocol import METRICS, VALUES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Written:
    """A run directory that somebody trains in, and the loggers of its controllers."""

    def __init__(self, directory: Path, *logging: str) -> None:
        text = f"run: {{directory: '{directory}'}}\nworkers: {{max: 1}}\n"
        self.config: RunConfig = load(text, [f"logging.{each}" for each in logging])
        self.directory = directory
        self._has_begun = False
        self._store, self._path = open_store(str(directory))
        claim(self._store, self._path, 1, {"token": "x", "incarnation": 1})

    def follow(self) -> Loggers:
        """Return the loggers of the next controller, which begins in another second.

        wandb names the folders of offline runs by the second, and the one before may have opened
        its own only when it closed.
        """
        now_s = int(time.time())
        while self._has_begun and int(time.time()) == now_s:
            time.sleep(0.01)
        self._has_begun = True
        owner = Owner(self._store, self._path, 1)
        loggers = Loggers(self.config, store=self._store, path=self._path, owner=owner)
        loggers.start()
        return loggers

    def train(self, first: int, last: int, *, attempt: int = 1) -> None:
        """Write the lines of steps; the loss tells which step and attempt it was."""
        for step in range(first, last + 1):
            line = {"step": step, "attempt": attempt, "loss": step + attempt / 10, "wall_time": 1e9}
            self._append(METRICS, line)
            accuracy = {"step": step, "attempt": attempt, "values": {"accuracy": step / 100}}
            self._append(VALUES, accuracy)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._store.append(f"{self._path}/{name}", f"{json.dumps(line)}\n".encode())


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Written]:
    """Makes a run; the loggers look often."""
    from orchestrator.shell.loggers import following

    monkeypatch.setattr(following, "_LOOK_S", 0.05)
    return lambda *logging: Written(tmp_path / "run", *logging)


EXPECTED = [(step, step + 0.1) for step in range(1, 8)] + [(8, 8.2), (9, 9.2), (10, 10.2)]


def cut_and_resume(run: Written) -> None:
    """Train steps 1 to 8 in an attempt, and 6 to 10 in one that another controller begins."""
    first = run.follow()
    run.train(1, 8)
    first.close("")
    second = run.follow()
    run.train(6, 10, attempt=2)
    second.close("completed")
    assert set(second.document().values()) == {""}, second.document()


def test_tensorboard_has_one_curve(make_run: Callable[..., Written]) -> None:
    """The second controller writes a file of its own beside that of the first."""
    run = make_run("tensorboard=true")
    cut_and_resume(run)

    found = in_tensorboard(run.directory / "tensorboard")
    assert found["train/loss"] == EXPECTED
    assert found["accuracy"] == [(step, step / 100) for step in range(1, 11)]
    assert len(list((run.directory / "tensorboard").iterdir())) == 2


def test_what_a_killed_controller_wrote_and_did_not_note_counts_once(
    make_run: Callable[..., Written],
) -> None:
    """It died between the service and the note: as if the note were older."""
    run = make_run("tensorboard=true")
    first = run.follow()
    run.train(1, 4)
    first.close("")
    before = (run.directory / LOGGERS).read_bytes()
    second = run.follow()
    run.train(5, 8)
    second.close("")
    (run.directory / LOGGERS).write_bytes(before)
    third = run.follow()
    run.train(9, 10)
    third.close("completed")

    steps = [step for step, _ in in_tensorboard(run.directory / "tensorboard")["train/loss"]]
    assert steps == list(range(1, 11))


def test_a_logger_that_comes_later_gets_the_whole_curve(make_run: Callable[..., Written]) -> None:
    """Somebody resumes the run with TensorBoard in another place."""
    run = make_run("tensorboard=true")
    first = run.follow()
    run.train(1, 8)
    first.close("stopped")
    other = make_run(f"tensorboard={run.directory.parent / 'elsewhere'}")
    second = other.follow()
    other.train(9, 10)
    second.close("completed")

    steps = [step for step, _ in in_tensorboard(run.directory.parent / "elsewhere")["train/loss"]]
    assert steps == list(range(1, 11))


def test_wandb_has_one_run_and_one_curve(make_run: Callable[..., Written]) -> None:
    """``wandb sync`` sends both files of an offline run to the same run."""
    ends = sys.exit, sys.excepthook
    run = make_run("wandb={project: p, mode: offline}")
    cut_and_resume(run)

    names, rows = in_wandb(run.directory, 10)
    noted = json.loads((run.directory / LOGGERS).read_text())["services"]["wandb"][0]
    assert names == {noted}
    assert rows == EXPECTED
    assert (sys.exit, sys.excepthook) == ends, "the process belongs to the controller"


def test_mlflow_has_one_run_and_one_curve(
    make_run: Callable[..., Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On files, which MLflow still has for such uses."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    run = make_run(f"mlflow={{experiment: e, tracking_uri: '{uri}'}}")
    cut_and_resume(run)

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == EXPECTED
    assert found.info.status == "FINISHED"
    assert found.data.params["workers.max"] == "1"


def test_a_service_that_refuses_stops_nothing_and_gets_all_later(
    make_run: Callable[..., Written],
) -> None:
    """A file lies where the directory is to be; the other service does not wait for it."""
    run = make_run("tensorboard=true", "wandb={project: p, mode: offline}")
    (run.directory / "tensorboard").write_text("in the way")
    first = run.follow()
    run.train(1, 8)
    first.close("")
    assert "Error" in first.document()["tensorboard"]
    assert first.document()["wandb"] == ""
    assert [step for step, _ in in_wandb(run.directory, 7)[1]] == list(range(1, 8))

    (run.directory / "tensorboard").unlink()
    second = run.follow()
    run.train(9, 10)
    second.close("completed")
    steps = [step for step, _ in in_tensorboard(run.directory / "tensorboard")["train/loss"]]
    assert steps == list(range(1, 11))


def test_a_controller_that_died_before_its_first_point_began_the_same_run(
    make_run: Callable[..., Written],
) -> None:
    run = make_run("wandb={project: p, mode: offline}")
    run.follow().close("")
    first = json.loads((run.directory / LOGGERS).read_text())["services"]["wandb"]
    cut_and_resume(run)

    assert first[1] == -1
    assert in_wandb(run.directory, 10) == ({first[0]}, EXPECTED)
