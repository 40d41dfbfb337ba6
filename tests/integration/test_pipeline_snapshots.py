"""Snapshots of a pipeline: each stage's leave where that stage waits for another."""

import json
from pathlib import Path
from typing import Any

from tests.support import pipeline_stage
from tests.support.forking import forking
from tests.support.pipeline_stage import NUM_BUCKETS, NUM_STEPS

NUM_STAGES = 3
#: The first step tells where the waits are; in the first two, stages get to know each other too.
NUM_LEARNING = 3
LIMIT_S = 120


def _in_waits(step: dict[str, Any]) -> int:
    """Return how many buckets left while the stage did not compute."""
    return sum(not any(low <= at <= high for low, high in step["busy"]) for at in step["left"])


def test_buckets_leave_where_their_stage_waits(tmp_path: Path) -> None:
    """1F1B of three real processes, six micro-batches, two blocks a stage.

    The first stage has its wait behind three forward passes of six, when by its passes alone half
    of the buckets were gone.
    """
    for rank in range(NUM_STAGES):
        (tmp_path / f"node-{rank}").mkdir()
    context = forking()
    stages = [
        context.Process(target=pipeline_stage.main, args=(rank, NUM_STAGES, tmp_path))
        for rank in range(NUM_STAGES)
    ]
    for stage in stages:
        stage.start()
    try:
        for stage in stages:
            stage.join(LIMIT_S)
        assert [stage.exitcode for stage in stages] == [0] * NUM_STAGES
    finally:
        for stage in stages:
            stage.kill()
    for rank in range(NUM_STAGES):
        steps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(steps) == NUM_STEPS
        # Before there was a step to count passes of, there were few.
        assert all(len(step["left"]) == NUM_BUCKETS for step in steps[1:])
        found = sum(_in_waits(step) for step in steps[NUM_LEARNING:])
        assert found >= 0.75 * NUM_BUCKETS * (NUM_STEPS - NUM_LEARNING)
