"""Scripts as people write them, as ``everstep run`` runs them, with a kill."""

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from everstep import run as run_alone
from orchestrator.config import RunConfig
from orchestrator.driver.changes import require_resumable
from orchestrator.driver.faults import signal_rank, wait_for
from orchestrator.driver.launch import Launched, launch_run
from orchestrator.errors import ConfigError
from tests.support import train_told
from tests.support.endless import endless
from ucp_core.errors import HeldError
from ucp_core.native import open_checkpoint
from ucp_core.storage import LocalStore

pytestmark = pytest.mark.timeout(900)

ACT_S_MAX = 240.0
#: One of the workers has a NaN in BAD; all save behind SAVE and wait behind HALT; rank 0 asks for
#: the end in the body of STOP.
BAD, SAVE, HALT, STOP = 3, 5, 6, 9


def _config(make: Callable[..., RunConfig], *arguments: str) -> RunConfig:
    return make(
        run__script=train_told.__file__, run__arguments=json.dumps(arguments), workers__max=2,
        workers__standby_per_node=0, train__steps=40, train__global_batch=8, train__micro_batch=2,
    )  # fmt: skip


def test_a_nan_a_save_and_an_early_stop_with_a_kill_between(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The worker is killed behind the skipped update and the save; the run is complete at the end.

    It is told in the terminal, which shows what rank 0 logs, and by an incident.
    """
    told = (f"{BAD}:nan", "2:save", f"{SAVE}:save", f"{STOP}-40:stop:0")
    config = _config(make_config, *told, f"{HALT + 1}:wait={tmp_path / 'goes on'}")
    directory = Path(config.run.directory)
    run = Launched(config, nodes)
    reached = wait_for(run, lambda s: s["step"] >= HALT, timeout_s=ACT_S_MAX)
    assert reached is not None, run.summary()
    signal_rank(run, 1, signal.SIGKILL)
    (tmp_path / "goes on").touch()
    summary = run.follow(lambda _: None)

    last = summary["steps"]
    # The others of the last attempt, if there are any, hear of it in the next step.
    assert last in (STOP, STOP + 1)
    assert summary["outcome"] == "completed"
    assert summary["reason"].endswith("the script stopped: enough")
    found = {one["kind"]: one for one in summary["incidents"]}
    assert found.keys() == {"not_finite", "crash"}
    assert "step 3 is not finite: the loss of micro-batch" in found["not_finite"]["evidence"]
    assert found["not_finite"]["guilty"] == []
    logs = "".join(path.read_text() for path in directory.glob("logs/*/rank0.log"))
    # The controller adds who the ranks are.
    assert found["not_finite"]["evidence"].partition(" (rank ")[0] in logs
    text = (directory / "metrics/rank0.jsonl").read_text()
    rows = [json.loads(one) for one in text.splitlines()]
    assert {row["step"] for row in rows if row.get("skipped")} == {BAD}
    assert sorted({row["step"] for row in rows}) == list(range(1, last + 1))
    # The file is the version of its step, and there is nothing beside it.
    saved = directory / "saved/best"
    assert [path.name for path in saved.iterdir()] == ["model.safetensors"]
    assert {name: tuple(one.shape) for name, one in load_file(saved / "model.safetensors").items()}
    assert open_checkpoint(LocalStore(), f"{directory}/checkpoints/step-{last:08d}").step == last
    with pytest.raises(ConfigError, match=rf"is complete, the script stopped it after step {last}"):
        require_resumable(config)


def test_a_start_with_another_model_costs_no_checkpoint(
    nodes: Any, make_config: Callable[..., RunConfig]
) -> None:
    """It took the newest for damaged, then the older ones, and the next start began behind those.

    A file that is named like a newer checkpoint is passed over.
    """

    def start(width: int, steps: int) -> dict[str, Any]:
        config = make_config(
            run__script=train_told.__file__, run__arguments=f'["width={width}"]', workers__max=1,
            workers__standby_per_node=0, train__steps=steps, train__global_batch=8,
            train__micro_batch=2, checkpoint__every_steps=5,
        )  # fmt: skip
        checkpoints = Path(config.run.directory) / "checkpoints"
        if checkpoints.exists():
            (checkpoints / "step-00000099").touch()
        return dict(Launched(config, nodes).follow(lambda _: None))

    assert start(5, 12)["outcome"] == "completed"
    slip = start(6, 20)
    last = start(5, 20)

    assert (slip["outcome"], slip["attempts"]) == ("failed", 2)
    assert "step-00000012 is a checkpoint of another model" in slip["reason"]
    assert re.search(r"0\.bias .* is F32\[5\] in it, needed is F32\[6\]", slip["reason"])
    assert "run.init_from" in slip["reason"]
    assert last["outcome"] == "completed"
    assert last["attempts"] == 3
    text = (Path(make_config().run.directory) / "metrics/rank0.jsonl").read_text()
    rows = [json.loads(one) for one in text.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))


def test_a_run_and_a_script_that_runs_alone_refuse_each_other(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Both trained, and wrote into one another; so they did while the run had no controller."""
    config = make_config(
        run__script=train_told.__file__, workers__max=1,
        workers__standby_per_node=0, train__steps=100_000, train__global_batch=8,
        train__micro_batch=2,
    )  # fmt: skip
    run = Launched(config, nodes)
    assert wait_for(run, lambda s: s["step"] >= 1, timeout_s=ACT_S_MAX), run.summary()
    with pytest.raises(
        HeldError, match=rf"another process trains in .*: pid {run.controller_pid()}, host "
    ):
        run_alone(lambda _: None, directory=config.run.directory, steps=1)
    os.kill(run.controller_pid(), signal.SIGKILL)
    with pytest.raises(HeldError, match="another process trains in "):
        run_alone(lambda _: None, directory=config.run.directory, steps=1)
    assert wait_for(run, lambda s: s["step"] >= 1, timeout_s=ACT_S_MAX), run.summary()
    run.stop("enough")
    assert run.follow(lambda _: None)["outcome"] == "stopped"

    other = tmp_path / "alone"
    with endless(other) as process:
        settings = replace(config.run, directory=str(other))
        with pytest.raises(HeldError, match=f"pid {process.pid}, host "):
            launch_run(config.model_copy(update={"run": settings}))
    assert [path.name for path in other.iterdir()] == ["claims"]


@pytest.mark.chaos
def test_a_state_dict_of_one_rank_ends_the_run_at_once_and_says_what_to_use(
    nodes: Any, make_config: Callable[..., RunConfig]
) -> None:
    """4 attempts in 20 steps, no rank guilty, and a file with a third of each weight."""
    summary = Launched(_config(make_config, "1-40:state_dict:0"), nodes).follow(lambda _: None)

    assert (summary["outcome"], summary["attempts"]) == ("failed", 1)
    rows = Path(train_told.__file__).read_text().splitlines()
    line = next(number for number, row in enumerate(rows, 1) if '"state_dict": lambda' in row)
    assert f"model.state_dict() was called at train_told.py:{line} by some" in summary["reason"]
    assert 'session.save("best") on all workers' in summary["reason"]
