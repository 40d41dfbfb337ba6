"""A user installs everstep and has no checkout, but files and variables of other programs."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.tree import ROOT
from tests.support.installed import Installed, build_wheel
from tests.support.run_command import ACT_S_MAX, last_step, wait

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'everstep[dev]'")

pytestmark = pytest.mark.timeout(600)

NOTEBOOK = ROOT / "workers/guide/kill_a_worker.ipynb"
TOLD = """
drawn = [text.get_text() for text in axes.texts]
Path("shown.json").write_text(json.dumps({"begins": begins, "drawn": drawn, "output": output}))
"""
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
#: On top of the example ``local/small``.
CHANGES = (
    "run.directory=runs/a",
    "run.script=scripts/train.py",
    "workers.max=2",
    "workers.standby_per_node=0",
    "train.steps=100000",
    "train.global_batch=4",
    "checkpoint.every_steps=100000",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own."""
    directory = tmp_path_factory.mktemp("installed")
    return Installed(build_wheel(directory), directory)


@pytest.fixture(scope="module")
def notebook(installed: Installed) -> Iterator[subprocess.Popen[str]]:
    """The notebook of the guide, which trains on a cluster of its own."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (installed.directory / "notebook.py").write_text("\n".join([*code, TOLD]))
    with (installed.directory / "printed").open("w") as printed:
        process = installed.begin("python", "notebook.py", stdout=printed, stderr=printed)
        yield process
        process.kill()
        process.wait()


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


# It runs beside this one: each waits most of the time for a cluster of its own.
@pytest.mark.usefixtures("notebook")
def test_an_example_of_the_wheel_trains_among_files_of_others_and_ends_with_slurm_s_signal(
    installed: Installed, tmp_path: Path
) -> None:
    """Everything that a run needs must be in the wheel, also in the processes of workers.

    Prints of a script were in Ray's own log folder only, which is gone with the cluster.
    attrs.py in the working directory, a long TMPDIR and RANK each ended or hung a run. SIGUSR1,
    which srun sends to all processes, ended all of them in the middle of a step.
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / "attrs.py").write_text("x = 1\n")
    (tmp_path / "project.py").write_text("NAME = 'project'\n")
    (tmp_path / "scripts/beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.9"}
    long = tmp_path / ("long" * 20)
    long.mkdir()
    with installed.begin(
        "everstep",
        *("run", "local/small", *CHANGES, "--local-nodes=1"),
        cwd=tmp_path,
        environment={**place, "TMPDIR": str(long)},
        stderr=subprocess.STDOUT,
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
    logs = installed.run("everstep", "logs", str(tmp_path / "runs/a"))
    assert (logs.returncode, logs.stdout) == (0, "project beside []\n"), logs.stderr
    assert "0 steps lost" in output
    assert len(group) > 4, "the workers were among them"
    step = last_step(str(tmp_path / "runs/a"))
    assert (tmp_path / f"runs/a/checkpoints/step-{step:08d}/manifest.json").exists()


def test_the_notebook_kills_a_worker_and_shows_the_curve(
    installed: Installed, notebook: subprocess.Popen[str]
) -> None:
    """It is run nowhere else, and it is the first thing that many run."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'everstep[dev]'")
    code = notebook.wait(ACT_S_MAX)

    assert code == 0, (installed.directory / "printed").read_text()
    shown = json.loads((installed.directory / "shown.json").read_text())
    assert shown["begins"][0] > 60
    assert shown["drawn"][0] == "attempt 2"
    assert "died of SIGKILL" in shown["output"]
    assert "notebook was stopped after step" in shown["output"]
    assert (installed.directory / "runs/notebook/report.html").is_file()


@pytest.mark.chaos
def test_a_wheel_runs_the_demo(installed: Installed) -> None:
    """It takes two minutes, so it runs with the long ones."""
    demo = installed.run("everstep", "demo", "--json")

    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)["weights_equal"] is True
    assert (installed.directory / "runs/demo/disturbed/report.html").is_file()
