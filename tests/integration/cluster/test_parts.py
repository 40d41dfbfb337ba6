"""A script with parts that only some workers use, as a reader would run it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver.launch import Launched
from tests.support.trainers import Run
from workers.protocol import Completed
from workers.settings import RunSettings, Settings

pytestmark = pytest.mark.timeout(900)

PARTS = Path(__file__).parents[2] / "support/train_parts.py"


def test_parts_that_are_used_late_or_rarely_end_equal_though_a_worker_dies(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The optimizer's state of a part appears on all workers in one step, which is saved."""
    (tmp_path / "alone").mkdir()
    config = make_config(
        run__script=PARTS,
        run__arguments=json.dumps([f"die={tmp_path / 'died'}"]),
        workers__max=3,
        workers__standby_per_node=0,
        train__steps=12,
        train__global_batch=16,
        train__micro_batch=2,
    )
    with Run(tmp_path / "alone") as run:
        chosen = RunSettings(directory="run", script=str(PARTS))
        (left,) = run.train(Settings(run=chosen, train=config.train), num_workers=1)
        assert isinstance(left.outcome, Completed), left.outcome

    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    assert [one["kind"] for one in summary["incidents"]] == ["crash"]
    alone = json.loads((tmp_path / "alone/result.json").read_text())
    assert summary["weights_digest"] == alone["weights_digest"]
