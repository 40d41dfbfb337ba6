"""Small runs for ``tests.support.trainers``: their settings, and what they leave behind."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from tests.support.trainers import Run
from ucp_core.native import find_committed
from ucp_core.storage import LocalStore
from workers.parallel import fsdp
from workers.protocol import Completed
from workers.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    RunSettings,
    Settings,
    TrainSettings,
)

#: Guards against a hang; some milliseconds to seconds on an idle machine.
WAIT_S_MAX = 240.0


def write_texts(root: Path) -> DataSettings:
    """Return data to train on, written below ``root``."""
    directory = root / "text"
    directory.mkdir()
    for number in range(40):
        words = " ".join(str(value * value * (number + 3)) for value in range(300))
        (directory / f"{number:03d}.txt").write_text(words)
    return DataSettings(
        source=f"{directory}/*.txt",
        sequence_length=16,
        validation_share=0.2,
        validation_samples=8,
        cache_directory=str(root / "cache"),
    )


def settings(data: DataSettings, **train: Any) -> Settings:
    chosen = {"steps": 6, "global_batch": 16, "micro_batch": 2, "warmup_steps": 2, **train}
    return Settings(
        model=ModelSettings(preset="tiny"),
        data=data,
        train=TrainSettings(**chosen),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )


def of_script(
    script: str | Path, *arguments: str, every_steps: int = 1, keep: int = 0, **train: Any
) -> Settings:
    """Return settings of a run that trains by a script."""
    return Settings(
        run=RunSettings(directory="run", script=str(script), arguments=arguments),
        train=TrainSettings(**train),
        checkpoint=CheckpointSettings(every_steps=every_steps, keep=keep),
    )


def small_units() -> None:
    """Cut a small model as a large one."""
    fsdp.SMALL_BYTES_MAX = 0  # type: ignore[misc]


def finish(run: Run, chosen: Settings, **how: Any) -> None:
    """Run the next attempt to the end of the run."""
    for left in run.train(chosen, **how):
        outcome = left.outcome
        assert isinstance(outcome, Completed), getattr(outcome, "traceback", outcome)


def lines(run: Run, name: str = "metrics/rank0.jsonl") -> list[dict[str, Any]]:
    """Return what is written so far, without half a line: being written, or of a killed worker."""
    text = (run.directory / name).read_text()
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def curve(directory: Path) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate of every step of a run, as it counted in the end."""
    text = (directory / "metrics/rank0.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: (line["loss"], line["lr"]) for line in found}


def result(run: Run) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run.directory / "result.json").read_text())
    return document


def reset(run: Run) -> None:
    """Begin a new run in the same directory with the same processes; attempts go on counting."""
    for name in ("metrics", "checkpoints", "result.json"):
        path = run.directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def newest(run: Run) -> tuple[int, int]:
    found = find_committed(LocalStore(), f"{run.directory}/checkpoints", lineage=run.lineage)
    assert found is not None
    return found.step, found.attempt


def wait_for_steps(run: Run, num_steps: int) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not (run.directory / "metrics/rank0.jsonl").exists() or len(lines(run)) < num_steps:
        assert time.monotonic() < deadline_s, "the workers do not train"


def times_of(run: Run, pattern: str) -> dict[str, int]:
    files = run.directory.glob(f"checkpoints/*/{pattern}")
    return {str(file): file.stat().st_mtime_ns for file in files}
