"""The first minutes of a newcomer: an empty folder, two commands; a notebook, cell by cell."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.arch.tree import ROOT
from tests.support.run_command import ACT_S_MAX, EVERSTEP, last_step

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(600)]

NOTEBOOK = ROOT / "workers/guide/kill_a_worker.ipynb"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_two_commands_lead_from_an_empty_folder_to_steps(tmp_path: Path) -> None:
    """And the third one says that there is nothing left to do, and where everything is."""
    subprocess.run([*EVERSTEP, "init"], check=True)
    began_s = time.monotonic()
    run = subprocess.Popen(
        [*EVERSTEP, "run", "train.steps=20", "model.preset=tiny"], stdout=subprocess.PIPE, text=True
    )
    while not last_step("runs/first") and run.poll() is None:
        assert time.monotonic() - began_s < ACT_S_MAX
        time.sleep(0.1)
    first_s = time.monotonic() - began_s
    told, _ = run.communicate(timeout=ACT_S_MAX)
    export = told.splitlines()[-1].partition("everstep ")[2].replace("DST", "out")
    exported = subprocess.run([*EVERSTEP, *export.split()], check=False)

    assert run.returncode == 0, f"after {first_s:.1f} s"
    assert "first is complete after step 20 of 20" in told
    assert "Its last checkpoint is runs/first/checkpoints/step-00000020." in told
    assert (tmp_path / "runs/first/report.html").exists()
    assert exported.returncode == 0
    assert (tmp_path / "out/model.safetensors").exists()


def test_the_notebook_kills_a_worker_and_draws_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells are run as a kernel runs them; the value of the last expression is shown."""
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "everstep").exists():
        pytest.skip("the command everstep is not installed beside this Python")
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    shown: Any = None

    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "commit it without outputs"
            shown = _run("".join(cell["source"]), names)

    assert shown is names["curve"]
    (second,) = names["curve"].begins
    assert 50 < second <= 200
    assert f"killed at step {second}" in shown._repr_svg_()
    assert "notebook is complete after step 200 of 200" in names["output"]


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last expression, None if it ends with another line."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)  # noqa: S102
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
