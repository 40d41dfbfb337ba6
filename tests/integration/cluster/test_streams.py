"""Streams under ``everstep run``, with a kill: exact, or the run ends and says why."""

import ast
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver.faults import signal_rank, wait_for
from orchestrator.driver.launch import Launched
from tests.support import train_own_order

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SAID = {
    "buffer": "the stream Buffered does not continue where its state_dict says",
}


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["fine", "buffer"])
def test_a_stream_goes_on_exactly_or_the_run_ends(
    how: str, nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Survivors have read on in it; a newcomer has not. No sample is lost or seen twice."""
    config = make_config(
        run__script=train_own_order.__file__, run__arguments=json.dumps([str(tmp_path), how]),
        workers__min=3, workers__max=3, train__steps=12, train__global_batch=6,
        train__micro_batch=2, checkpoint__every_steps=1, workers__standby_per_node=0,
    )  # fmt: skip
    run = Launched(config, nodes)
    reached = wait_for(run, lambda s: s["redundancy"]["step"] == 5, timeout_s=240)
    assert reached is not None, run.summary()
    signal_rank(run, 2, signal.SIGKILL)
    # Or until the run is over.
    wait_for(run, lambda s: s["attempt"] > reached["attempt"], timeout_s=240)
    (tmp_path / "go on").touch()
    summary = run.follow(lambda _: None)

    if how in SAID:
        assert summary["outcome"] == "failed", summary
        assert SAID[how] in summary["reason"]
        assert summary["steps"] == 5
        return
    assert summary["outcome"] == "completed", summary
    # A rank with fewer micro-batches gets one again.
    steps = [
        {
            number
            for path in tmp_path.glob(f"{step}-*")
            for number in ast.literal_eval(path.read_text())
        }
        for step in range(1, 7)
    ]
    assert [len(step) for step in steps] == [6] * 6
    assert len(set[int]().union(*steps)) == 36


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["generator", "cursor"])
def test_a_stream_that_keeps_its_order_to_itself_never_begins(
    how: str, nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A run lost all at its first resume."""
    config = make_config(
        run__script=train_own_order.__file__, run__arguments=json.dumps([str(tmp_path), how]),
        workers__max=2, train__steps=12, train__global_batch=6, train__micro_batch=2,
    )  # fmt: skip
    summary = Launched(config, nodes).follow(lambda _: None)

    assert (summary["outcome"], summary["steps"]) == ("failed", 0), summary
    assert "the stream Stream was read twice before the first step" in summary["reason"]


@pytest.mark.chaos
def test_workers_that_read_different_samples_stop_at_that_step(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(
        run__script=train_own_order.__file__,
        run__arguments=json.dumps([str(tmp_path), "ranks"]),
        workers__max=2, train__steps=12, train__global_batch=4, train__micro_batch=2,
    )  # fmt: skip
    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "failed"
    assert (
        "step 1: rank 0 and rank 1 have read different samples of the stream" in summary["reason"]
    )
    assert summary["steps"] == 0
