"""A user installs everstep and has no checkout."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.arch.tree import ROOT
from tests.support.installed import Installed, build_wheel

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'everstep[dev]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'everstep[dev]'")

NOTEBOOK = ROOT / "workers/guide/kill_a_worker.ipynb"
TOLD = """
drawn = [text.get_text() for text in axes.texts]
Path("shown.json").write_text(json.dumps({"begins": begins, "drawn": drawn, "output": output}))
"""


def _as_script(notebook: Path) -> str:
    """Return the cells of code, one after the other, and what tells their results."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(["".join(cell["source"]) for cell in code] + [TOLD])


def test_a_wheel_trains_an_example_and_kills_a_worker_in_the_notebook(tmp_path: Path) -> None:
    """Everything that a run needs must be in the wheel, also in the processes of workers."""
    installed = Installed(build_wheel(tmp_path), tmp_path)
    (tmp_path / "notebook.py").write_text(_as_script(NOTEBOOK))
    small = ("train.steps=6", "model.preset=tiny", "workers.max=1", "workers.standby_per_node=0")

    # Each waits most of the time for a cluster of its own.
    with ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(installed.run, *words)
            for words in (
                ("everstep", "run", "local/small", *small, "--local-nodes=1", "--json"),
                ("python", "notebook.py"),
            )
        ]
        built_in, notebook = (one.result() for one in begun)

    assert built_in.returncode == 0, built_in.stderr
    assert json.loads(built_in.stdout)["steps"] == 6
    assert notebook.returncode == 0, notebook.stderr
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["begins"][0] > 60
    assert shown["drawn"][0] == "attempt 2"
    assert "died of SIGKILL" in shown["output"]
    assert "notebook was stopped after step" in shown["output"]
    assert (tmp_path / "runs/notebook/report.html").is_file()


@pytest.mark.chaos
def test_a_wheel_runs_the_demo(tmp_path: Path) -> None:
    """It takes two minutes, so it runs with the long ones."""
    installed = Installed(build_wheel(tmp_path), tmp_path)

    demo = installed.run("everstep", "demo", "--json")

    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)["weights_equal"] is True
    assert (tmp_path / "runs/demo/disturbed/report.html").is_file()
