"""What the deterministic mode costs over plain gradient accumulation.

    python -m tests.benchmarks deterministic [--preset small] [--workers 4] [--rounds 6]

The same processes train with and without it in turn, so other load falls on both. Prints, as JSON,
the wall time of a step (median over rounds), the processor time of all workers, and their ratios.
The goal is a ratio of at most 1.08 at 8 micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Final

from tests.support.trainers import Run
from workers.protocol import Completed
from workers.settings import (
    CheckpointSettings,
    ModelSettings,
    Settings,
    TrainSettings,
)

GOAL_RATIO_MAX: Final = 1.08
NUM_MICRO_BATCHES: Final = 8
MODES: Final = {"plain": False, "deterministic": True}


def settings(preset: str, num_steps: int, *, deterministic: bool) -> Settings:
    return Settings(
        model=ModelSettings(preset=preset),
        train=TrainSettings(
            steps=num_steps,
            global_batch=2 * NUM_MICRO_BATCHES,
            micro_batch=2,
            warmup_steps=1,
            deterministic=deterministic,
        ),
        checkpoint=CheckpointSettings(every_steps=num_steps),
    )


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def train(run: Run, chosen: Settings, num_workers: int) -> tuple[list[float], float]:
    """Return the wall time of every step but the first, and the CPU time of all workers."""
    (run.directory / "metrics/rank0.jsonl").unlink(missing_ok=True)
    pids = [trainer.process.pid or 0 for trainer in run.trainers]
    before_s = sum(map(cpu_s, pids))
    outcomes = [left.outcome for left in run.train(chosen, num_workers=num_workers)]
    assert all(isinstance(outcome, Completed) for outcome in outcomes), outcomes
    used_s = sum(cpu_s(trainer.process.pid or 0) for trainer in run.trainers) - before_s
    lines = (run.directory / "metrics/rank0.jsonl").read_text().splitlines()
    return [json.loads(line)["step_s"] for line in lines][1:], used_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    step_s: dict[str, list[float]] = {name: [] for name in MODES}
    used_s = dict.fromkeys(MODES, 0.0)
    with tempfile.TemporaryDirectory() as directory, Run(Path(directory)) as run:
        train(run, settings(asked.preset, 2, deterministic=True), asked.workers)
        for _ in range(asked.rounds):
            for name, deterministic in MODES.items():
                chosen = settings(asked.preset, asked.steps, deterministic=deterministic)
                durations_s, cpu = train(run, chosen, asked.workers)
                step_s[name] += durations_s
                used_s[name] += cpu
    wall = {name: statistics.median(durations) for name, durations in step_s.items()}
    cpu_each = {name: used / asked.rounds / asked.steps for name, used in used_s.items()}
    document = {
        "preset": asked.preset,
        "workers": asked.workers,
        "micro_batches": NUM_MICRO_BATCHES,
        "step_s": wall,
        "cpu_s_per_step": cpu_each,
        "wall_ratio": wall["deterministic"] / wall["plain"],
        "cpu_ratio": cpu_each["deterministic"] / cpu_each["plain"],
        "goal_ratio_max": GOAL_RATIO_MAX,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
