"""The layout follows the workers: every axis shrinks and grows, on simulated nodes, with kills."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver.faults import kill_node_of, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from tests.support.attempts import finish, lines
from tests.support.experts import with_experts
from tests.support.history import read_history
from tests.support.reach import ACT_S_MAX, SLOW, reach
from tests.support.trainers import Run
from workers.settings import Settings

pytestmark = pytest.mark.timeout(600)

#: A new worker takes ten seconds to start beside busy ones, and has to find steps to win.
_STEPS = 80


@pytest.mark.parametrize(
    ("degrees", "left"),
    [
        ({"tp": 2, "pp": 2}, "tp=2"),
        pytest.param({"pp": 2, "stages_per_worker": 2}, "pp=2", marks=pytest.mark.chaos),
        # Four parts of a sequence gather its keys and values, and two exchange heads.
        pytest.param({"cp": 4}, "cp=2", marks=pytest.mark.chaos),
    ],
    ids=str,
)
def test_a_lost_node_and_a_lost_worker_leave_the_layout_that_fits(
    nodes: Any,
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    degrees: dict[str, int],
    left: str,
) -> None:
    """Groups over two nodes; then one node, then one worker of it, then all of them again."""
    config = make_config(
        train__steps=100_000,
        # A larger one makes differences of rounding grow.
        train__lr=1e-4,
        train__schedule="constant",
        train__global_batch=8,
        train__micro_batch=2,
        train__deterministic=False,
        model__preset="tiny",
        model__tied=False,
        model__num_layers=2 * degrees.get("stages_per_worker", 1),
        **{f"parallel__{key}": value for key, value in degrees.items()},
        workers__standby_per_node=0,
        checkpoint__every_steps=50_000,
        **SLOW,
    )
    run = Launched(config, nodes)
    whole = reach(run, 4, workers=4)

    kill_node_of(run, 3)
    half = reach(run, 5, workers=2, attempt=whole["attempt"] + 1)
    half = reach(run, half["step"] + 3)
    signal_rank(run, 1, signal.SIGKILL)
    one = reach(run, half["step"] + 1, workers=1, attempt=half["attempt"] + 1)
    nodes.add_node()
    again = reach(run, one["step"] + 1, workers=4)
    reach(run, again["step"] + 3)
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    assert [whole["layout"], half["layout"], one["layout"], again["layout"]] == [
        again["layout"],
        left,
        "1 worker",
        whole["layout"],
    ]
    assert half["layout"] not in [other["layout"] for other in half["other_layouts"]]
    for incident in summary["incidents"]:
        assert set(incident["sources"]) <= {"local memory", "peer memory", "parity"}, incident
        assert incident["lost_steps"] <= 1, incident
    lost = summary["incidents"][0]
    assert (lost["layout_before"], lost["layout_after"]) == (whole["layout"], left)
    shown = [{"layout": layout, "why": why} for layout, why in lost["other_layouts"]]
    assert shown == half["other_layouts"]
    assert shown
    _check_curve(config, tmp_path / "alone", summary["steps"])


@pytest.mark.chaos
def test_experts_are_cut_in_as_many_ways_as_divide_the_workers_that_are_left(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Three workers shard all experts; when the node of one is lost, too, two have a half each."""
    config = make_config(
        train__steps=_STEPS,
        train__deterministic=False,
        model__preset=with_experts(tmp_path / "experts"),
        parallel__ep=2,
        workers__standby_per_node=0,
        checkpoint__every_steps=50_000,
    )
    run = Launched(config, nodes)
    whole = reach(run, 10, workers=4)

    signal_rank(run, 1, signal.SIGKILL)
    three = reach(run, 11, workers=3, attempt=whole["attempt"] + 1)
    three = reach(run, three["step"] + 3)
    at = {worker["rank"]: worker["node"] for worker in three["workers"] if worker["rank"] >= 0}
    kill_node_of(run, next(rank for rank, node in at.items() if [*at.values()].count(node) == 1))
    two = reach(run, three["step"] + 1, workers=2, attempt=three["attempt"] + 1)
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    layouts = [status["layout"] for status in (whole, three, two)]
    assert layouts == ["dp_shard=4 x ep=2", "dp_shard=3", "dp_shard=2 x ep=2"]
    assert max(incident["lost_steps"] for incident in summary["incidents"]) <= 1
    _check_curve(config, tmp_path / "alone", _STEPS)


def _check_curve(config: RunConfig, directory: Path, num_steps: int) -> None:
    """Assert that the losses are those of one process that nothing disturbed."""
    train = replace(config.train, steps=num_steps)
    settings = Settings(model=config.model, data=config.data, train=train)
    directory.mkdir()
    with Run(directory) as alone:
        finish(alone, settings, num_workers=1)
        expected = {line["step"]: line["loss"] for line in lines(alone)}
    history = read_history(config.run.directory)
    history.check_exactly_once(config, num_steps)
    for line in history.committed():
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=2e-3), line


@pytest.mark.chaos
def test_a_tensor_group_gets_one_node_of_a_cluster_that_has_room_on_two(
    nodes: Any, make_config: Callable[..., RunConfig]
) -> None:
    """Ray would reserve one worker on each; the group moves as one when its node is lost."""
    config = make_config(
        train__steps=8,
        train__deterministic=False,
        parallel__tp=2,
        cluster__local_nodes=1,
        workers__max=2,
        workers__min=2,
        workers__standby_per_node=0,
    )
    run = Launched(config, nodes)
    first = reach(run, 2, workers=2)
    kill_node_of(run, 1)
    second = reach(run, 1, workers=2, attempt=first["attempt"] + 1)
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    assert [first["layout"], second["layout"]] == ["tp=2", "tp=2"]


_NEEDS_THREE = """
import time
import everstep
import torch


def train(session):
    model = session.model(lambda: torch.nn.Linear(4, 4))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    for _ in session.steps(64):
        if session.world_size < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        time.sleep(0.1)
        session.train_step(lambda indices: model(torch.ones(len(indices), 4)).square().mean())


everstep.run(train)
"""


@pytest.mark.chaos
def test_what_runs_out_of_memory_waits_for_workers_and_is_charged_nothing(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Two workers hold too much each, at every degree: it is tried once more, and not again."""
    script = tmp_path / "train.py"
    script.write_text(_NEEDS_THREE)
    run = Launched(make_config(run__script=script, train__steps=30), nodes)
    whole = reach(run, 2, workers=4)

    kill_node_of(run, 3)
    waiting = wait_for(
        run,
        lambda s: s["phase"] == "waiting" and s["attempt"] > whole["attempt"],
        timeout_s=ACT_S_MAX,
    )
    assert waiting is not None, run.summary()
    nodes.add_node()
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    kinds = [incident["kind"] for incident in summary["incidents"]]
    assert kinds[:3] == ["node_loss", "device_memory", "device_memory"]
    assert kinds.count("device_memory") == 2
    refused = summary["incidents"][2]
    assert "dp_shard=2: CUDA out of memory" in refused["evidence"]
    assert sum(incident["lost_steps"] for incident in summary["incidents"]) <= 1


@pytest.mark.chaos
def test_a_model_without_a_plan_is_refused_with_the_nearest_layout(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The user asked for the degree, so the run does not go on without it."""
    script = tmp_path / "train.py"
    script.write_text(_NEEDS_THREE)
    summary = Launched(make_config(run__script=script, parallel__tp=2), nodes).follow(print)

    assert summary["outcome"] == "failed"
    assert summary["reason"] == (
        "dp_shard=2 x tp=2 was refused: parallel.tp=2: model Linear has no plan for it; give one, "
        "session.model(build, plan=everstep.ModelPlan(tensor={...})), or write parallel.tp: 1; "
        "the nearest layout that was not is dp_shard=4"
    )
