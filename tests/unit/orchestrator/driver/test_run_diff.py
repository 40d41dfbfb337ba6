"""Two runs beside each other, from directories as runs leave them."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.driver import diff_runs
from orchestrator.errors import RunNotFoundError
from tests.support.checkpoints import save, small_state
from tests.support.run_directories import Fault, write_run
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore

KILL = Fault(step=20, kind="crash", guilty=["w0002"], pause_s=2.0, lost_steps=3, workers_after=3)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Return two runs that trained alike, the second through a kill."""
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    write_run(calm)
    write_run(rough, faults=[KILL])
    for run in (calm, rough):
        for step in (20, 40):
            save(LocalStore(), small_state(), step=step, root=str(run / "checkpoints"))
        (run / "result.json").write_text(json.dumps({"step": 60, "weights_digest": "5f"}))
    return calm, rough


def change(run: Path, first_step: int, changed: Callable[[dict[str, Any]], Any]) -> None:
    """Change the lines of metrics from ``first_step`` on."""
    path = run / "metrics/rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] >= first_step:
            changed(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_repaired_itself_equals_the_calm_one(runs: tuple[Path, Path]) -> None:
    """Steps that it lost and took again count once."""
    found = CliRunner().invoke(app, ["diff", *map(str, runs)])

    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[0].startswith("steps 1 to 60 are equal: loss, gradient norm")
    assert "versions 20, 40: all weights and optimizer states are equal" in found.stdout
    assert found.stdout.splitlines()[-1] == "the weights at the end are equal"


def test_one_bit_of_one_step_is_found_with_what_came_before_it(runs: tuple[Path, Path]) -> None:
    """A tolerance would hide the first step that went another way."""
    change(runs[1], 30, lambda line: line.update(loss=math.nextafter(line["loss"], math.inf)))
    change(runs[1], 31, lambda line: line.update(order_start=7))

    found = CliRunner().invoke(app, ["diff", *map(str, runs), "--json"])
    document = json.loads(found.stdout)
    text = "\n".join(diff_runs(*map(str, runs)).lines())

    assert found.exit_code == 1
    assert (document["equal"], document["first_step"]) == (False, 30)
    loss, place = document["numbers"]
    assert (loss["name"], loss["first_ulp"], loss["num_steps"]) == ("loss", 1, 31)
    assert 0.0 < loss["max_relative"] < 3e-16
    assert (place["first_step"], place["first_values"]) == (31, [0.0, 7.0])
    calm, rough = document["situations"]
    assert (calm["incident"], calm["layout"]) == (None, "dp_shard=4")
    assert (rough["attempt"], rough["layout"]) == (2, "dp_shard=3")
    assert rough["incident"]["kind"] == "crash"
    assert rough["incident"]["who"] == "w0002"
    assert "step 30 is the first that differs, of steps 1 to 60" in text
    assert "in the last 1 of 64 bits" in text
    assert f"before that in {runs[0]}: no incident; attempt 1, dp_shard=4" in text
    assert f"before that in {runs[1]}: incident 1 (crash, w0002); attempt 2, dp_shard=3" in text


def test_what_comes_later_than_a_difference_did_not_cause_it(runs: tuple[Path, Path]) -> None:
    """The kill came behind step 20, in the attempt that took step 10."""
    change(runs[1], 10, lambda line: line.update(grad_norm=None))

    found = diff_runs(*map(str, runs))

    assert found.first_step == 10
    assert found.numbers[0].first_ulp is None
    assert [then.incident for then in found.situations] == [None, None]
    assert json.loads(json.dumps(found.to_json()))["numbers"][0]["first_values"] == [1.0, "nan"]


def test_versions_are_compared_up_to_the_first_that_differs(runs: tuple[Path, Path]) -> None:
    """Losses may be equal to all digits while a moment is not."""
    for step in (20, 40):
        state = small_state() | {
            key: tensor for key, tensor in small_state(1).items() if key == ("norm", "exp_avg")
        }
        save(LocalStore(), state, step=step, attempt=2, root=str(runs[1] / "checkpoints"))
    key = TensorKey("norm", "exp_avg")

    found = diff_runs(*map(str, runs))
    text = "\n".join(found.lines())

    assert not found.equal
    assert [(s, r.tensors[0].fqn, r.num_equal) for s, r in found.versions.items()] == [
        (20, key.fqn, 7)
    ]
    assert found.versions[20].tensors[0].slot == key.slot
    (command,) = re.findall(r"`ucp diff (.*)`", text)
    assert all(Path(path).is_dir() for path in command.split())
    assert diff_runs(*map(str, runs), weights=False).equal


def test_settings_are_told_and_are_no_difference(runs: tuple[Path, Path]) -> None:
    """Another number of workers is often just the question."""
    path = runs[1] / "config.yaml"
    path.write_text(path.read_text().replace("max: 4", "max: 3").replace("demo", "other"))

    found = diff_runs(*map(str, runs))

    assert found.equal
    assert found.settings == {"workers.max": (4, 3)}


def test_a_step_that_one_run_lost_is_a_difference(runs: tuple[Path, Path]) -> None:
    """A run that ends earlier has lost nothing, one with a hole has."""
    path = runs[1] / "metrics/rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] < 50))
    shorter = diff_runs(*map(str, runs))
    path.write_text("".join(line for line in lines if json.loads(line)["step"] != 33))
    hole = diff_runs(*map(str, runs))

    assert (shorter.equal, shorter.steps, shorter.same_end) == (True, (1, 49), None)
    assert (hole.equal, hole.gaps) == (False, (33,))


def test_what_cannot_be_compared_is_refused_by_name(runs: tuple[Path, Path]) -> None:
    """Exit code 1 would say that they differ."""
    later = write_run(runs[0].parent / "later")
    change(later, 1, lambda line: line.update(step=line["step"] + 100))
    nothing = CliRunner().invoke(app, ["diff", str(runs[0]), str(runs[0] / "none")])

    assert nothing.exit_code == 2
    assert "none holds no run" in nothing.stderr
    with pytest.raises(RunNotFoundError, match=r"calm has steps 1 to 60, .*later has steps 101"):
        diff_runs(str(runs[0]), str(later))
