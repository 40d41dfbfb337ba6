"""A run as people start it: in a folder with files of theirs, from the shell of another job."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.run_command import ACT_S_MAX, EVERSTEP, last_step, wait

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
import os
import time

import torch
from everstep import run

import beside
import project

print(project.NAME, beside.NAME, sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & {*os.environ}))


def train(session):
    model = session.model(lambda: torch.nn.Linear(4, 1))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    for step in session.steps(64):
        session.train_step(lambda samples: model(torch.ones(len(samples), 4)).square().mean())
        time.sleep(0.1)


run(train)
"""
CONFIG = """
run: {directory: runs/a, script: scripts/train.py}
cluster: {local_nodes: 1}
workers: {min: 1, max: 2}
train: {steps: 100000, global_batch: 4, micro_batch: 2}
checkpoint: {every_steps: 100000}
"""


def _group_of(parent: int) -> list[int]:
    """Return the processes of the cluster that ``parent`` has started, which are one group."""
    found: dict[int, list[int]] = {}
    leaders: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(") ")[2].split()
        found.setdefault(int(fields[2]), []).append(int(path.parent.name))
        if int(fields[1]) == parent:
            leaders.append(int(path.parent.name))
    return found[max(leaders, key=lambda pid: len(found.get(pid, ())))]


def test_a_run_begins_among_files_and_variables_of_others_and_ends_with_slurm_s_signal(
    tmp_path: Path,
) -> None:
    """attrs.py in the working directory, a long TMPDIR and RANK each ended or hung a run.

    SIGUSR1, which srun sends to all processes, ended all of them in the middle of a step.
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / "attrs.py").write_text("x = 1\n")
    (tmp_path / "project.py").write_text("NAME = 'project'\n")
    (tmp_path / "scripts/beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.9"}
    long = tmp_path / ("long" * 20)
    long.mkdir()
    given = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    with subprocess.Popen(
        # -P: the installed command does not have the working directory on its path, either.
        [EVERSTEP[0], "-P", *EVERSTEP[1:], "run", "run.yaml"],
        cwd=tmp_path,
        env={**given, **place, "TMPDIR": str(long)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait(lambda: last_step(str(tmp_path / "runs/a")) >= 2, "it trains", process)
            group = _group_of(process.pid)
            for pid in (process.pid, *group):
                os.kill(pid, signal.SIGUSR1)
            output, _ = process.communicate(timeout=ACT_S_MAX)
        finally:
            process.kill()

    assert process.returncode == 143, output
    assert "project beside []" in output
    assert "0 steps lost" in output
    assert len(group) > 4, "the workers were among them"
    step = last_step(str(tmp_path / "runs/a"))
    assert (tmp_path / f"runs/a/checkpoints/step-{step:08d}/manifest.json").exists()
