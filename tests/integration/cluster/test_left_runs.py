"""A test that fails leaves nothing to those that follow on the same cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.config import RunConfig
from orchestrator.driver.launch import Launched
from tests.integration.cluster.left_runs import actors_of, runs_ended
from tests.support.reach import PACED, reach
from tests.support.snapshots import eventually


def test_the_run_of_a_test_that_fails_is_ended(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """It would train on for 100,000 steps; a worker that it starts later would be left, too."""
    config = make_config(train__steps=100_000, workers__max=1, workers__standby_per_node=0, **PACED)
    directory = Path(config.run.directory)

    def fail() -> None:
        with runs_ended(tmp_path):
            reach(Launched(config, nodes), 2)
            assert "controller" in actors_of(directory)
            pytest.fail("as in a test that does not see what it expects")

    with pytest.raises(pytest.fail.Exception, match="as in a test"):
        fail()

    assert eventually(lambda: not actors_of(directory))
    assert eventually(lambda: ray.available_resources().get("CPU", 0.0) == 4.0, within_s=60.0)
