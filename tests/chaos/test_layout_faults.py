"""Kills in a layout of several axes: nothing is lost but a step, and the curve goes on."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from orchestrator.config import demo_config
from orchestrator.driver.launch import Launched
from orchestrator.shell import HostedCluster
from tests.support import train_dying
from tests.support.attempts import finish, lines
from tests.support.history import read_history
from tests.support.trainers import Run
from workers.settings import Settings

pytestmark = pytest.mark.timeout(1500)

PHASES = ("forward", "backward", "update")


def test_each_role_dies_in_each_phase_of_a_step(cluster: HostedCluster, tmp_path: Path) -> None:
    """Both stages and both tensor-parallel places, while a pipeline has micro-batches open."""
    # Each node in its turn: one with several failures more than the others is left alone.
    deaths = [(rank, phase) for phase, rank in product(PHASES, (0, 2, 1, 3))]
    config = demo_config(
        str(tmp_path / "run"),
        [
            f"run.script={train_dying.__file__}",
            f"run.arguments={json.dumps([str(tmp_path), json.dumps(deaths)])}",
            "train.steps=3000",
            "train.global_batch=8",
            "train.micro_batch=2",
            "train.schedule=constant",
            "train.deterministic=false",
            "parallel.tp=2",
            "parallel.pp=2",
        ],
    )
    summary = Launched(config, cluster).follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    crashes = [one for one in summary["incidents"] if one["kind"] == "crash"]
    assert len(crashes) == len(deaths)
    assert all(one["lost_steps"] <= 1 for one in summary["incidents"]), summary["incidents"]
    history = read_history(config.run.directory)
    history.check_exactly_once(config, num_steps=summary["steps"])
    directory = tmp_path / "alone"
    directory.mkdir()
    with Run(directory) as alone:
        calm = replace(config.run, arguments=(str(directory), json.dumps(deaths)))
        train = replace(config.train, steps=summary["steps"])
        finish(alone, Settings(run=calm, train=train), num_workers=1)
        expected = {line["step"]: line["loss"] for line in lines(alone)}
    for line in history.committed():
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-4), line
