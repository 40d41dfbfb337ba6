"""A second fault while the run recovers from the first, in each phase; and exceptions."""

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.config import RunConfig
from orchestrator.driver.faults import member, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.shell import OPTIONS, Controller
from tests.support.history import read_history
from tests.support.reach import ACT_S_MAX, PACED, kill_keeper_of, reach
from tests.support.snapshots import eventually
from ucp_core.storage import claims, next_claim

pytestmark = pytest.mark.timeout(900)

#: The journal's event when the second worker dies, and its attempt counted from the broken one.
PHASES = [("WorkerExited", 0), ("FenceAttempt", 0), ("StartAttempt", 1), ("WorkerFormed", 1)]


def _journal(directory: str) -> str:
    """Return the whole lines that are written so far."""
    text = "".join(p.read_text() for p in sorted(Path(directory, "journal").glob("*.jsonl")))
    return text[: text.rfind("\n") + 1]


def _wait_record(directory: str, kind: str, attempt: int, *, after: str) -> None:
    """Return as soon as the journal says ``kind`` of ``attempt``: within a few milliseconds.

    Earlier events, as in ``after``, do not count.
    """
    deadline_s = time.monotonic() + ACT_S_MAX
    while time.monotonic() < deadline_s:
        records = map(json.loads, _journal(directory)[len(after) :].splitlines())
        if any(r["kind"] == kind and r["attempt"] >= attempt for r in records):
            return
    pytest.fail(f"the journal never said {kind} of attempt {attempt}")


def _break(run: Launched, before: dict[str, Any], kind: str, later: int, second: int) -> None:
    """Kill a worker, and the process ``second`` once the journal says ``kind``."""
    directory = run.config.run.directory
    said = _journal(directory)
    signal_rank(run, 1, signal.SIGKILL)
    _wait_record(directory, kind, before["attempt"] + later, after=said)
    os.kill(second, signal.SIGKILL)


@pytest.mark.chaos
def test_second_process_dies_in_each_phase_of_recovery(
    begin_endless: Callable[..., Launched],
) -> None:
    """Half-done work belongs to an attempt that is over: none of it may count.

    After the workers the controller dies: its next incarnation folds the journal, finds who lives,
    and finishes what was begun.
    """
    run = begin_endless(**PACED)
    before = reach(run, 5, workers=4)
    for kind, later in PHASES:
        _break(run, before, kind, later, member(before, 3)["pid"])
        before = reach(run, before["step"] + 5, workers=4, attempt=before["attempt"] + 1)
    _break(run, before, "FenceAttempt", 0, run.controller_pid(timeout_s=ACT_S_MAX))
    reach(run, before["step"] + 5, workers=4, attempt=before["attempt"] + 1)
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    assert "controller_restart" in {each["kind"] for each in summary["incidents"]}
    read_history(run.config.run.directory).check_exactly_once(run.config, summary["steps"])


@pytest.mark.chaos
def test_a_controller_that_dies_while_a_run_ends_leaves_no_process(
    begin_endless: Callable[..., Launched],
) -> None:
    """The next incarnation finds a run that is over, and has no worker that it could end."""
    run = begin_endless(workers__max=2, workers__standby_per_node=0, **PACED)
    before = reach(run, 5, workers=2)
    pids = [row["pid"] for row in before["workers"]]
    keepers = [node["keeper_pid"] for node in before["nodes"]]
    controller = run.controller_pid(timeout_s=ACT_S_MAX)
    # The end of a run waits some seconds for one that does not answer.
    os.kill(keepers[0], signal.SIGSTOP)
    try:
        run.stop("all is seen")
        _wait_record(run.config.run.directory, "FinishRun", 0, after="")
        os.kill(controller, signal.SIGKILL)
    finally:
        os.kill(keepers[0], signal.SIGCONT)
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    deadline_s = time.monotonic() + ACT_S_MAX
    while left := [pid for pid in (*pids, *keepers) if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"{left} are left of {pids}, {keepers}"
        time.sleep(0.2)


def test_a_controller_ends_when_another_one_has_taken_its_place(
    begin_endless: Callable[..., Launched],
) -> None:
    """Ray starts another when it takes a process for dead, and both decide until one notices.

    Ray restarts here the one that ends, so the other one ends, too.
    """
    run = begin_endless(workers__max=2, **PACED)
    before = reach(run, 5, workers=2)
    newest = next_claim(run.store, run.path) - 1
    other: Any = ray.remote(Controller).options(**{**OPTIONS, "max_restarts": 0})
    other = other.remote(
        run_id=run.names.run_id,
        config=run.config.model_dump(mode="json"),
        claim=newest,
        token=claims(run.store, run.path)[newest]["token"],
    )
    pids = [run.controller_pid(timeout_s=ACT_S_MAX), ray.get(other.pid.remote())]

    assert eventually(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=ACT_S_MAX
    )
    signal_rank(run, 1, signal.SIGKILL)
    reach(run, before["step"] + 5, workers=2, attempt=before["attempt"] + 1)
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    read_history(run.config.run.directory).check_exactly_once(run.config, summary["steps"])


def test_a_controller_restarts_a_keeper_that_stopped_before_it_began(
    begin_endless: Callable[..., Launched],
) -> None:
    """It gave up the node after 30 s, and killed workers that trained."""
    run = begin_endless(workers__standby_per_node=0, **PACED)
    before = reach(run, 5, workers=4)
    stopped = kill_keeper_of(run, 1, signal.SIGSTOP)
    os.kill(run.controller_pid(timeout_s=ACT_S_MAX), signal.SIGKILL)

    def is_back(status: dict[str, Any]) -> bool:
        keepers = [node["keeper_pid"] for node in status["nodes"]]
        return len(keepers) == 2 and None not in keepers and stopped not in keepers

    assert wait_for(run, is_back, timeout_s=ACT_S_MAX) is not None
    reach(run, before["step"] + 5, workers=4)
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    assert {each["kind"] for each in summary["incidents"]} == {"controller_restart", "stop"}


SCRIPT = """
    import torch
    from torch import nn
    from everstep import Session, run

    def train(session: Session) -> None:
        inputs = torch.linspace(-1, 1, 64).reshape(-1, 1)
        model = session.model(lambda: nn.Linear(1, 1))
        session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
        for step in session.steps(len(inputs)):
            for samples in step.micro_batches():
                loss = (model(inputs[samples]) - inputs[samples]).square().mean()
                step.backward(loss, tokens=len(samples))
            step.apply()
            {bug}

    if __name__ == "__main__":
        run(train)
"""


def _script(tmp_path: Path, bug: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("{bug}", bug))
    return str(path)


def test_user_bug_fails_fast_and_shows_the_users_own_lines(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Restarting a bug again and again wastes a cluster's night."""
    bug = "nosuchname if step.number >= 3 else None"
    config = make_config(
        train__steps=20, train__warmup_steps=2, workers__max=2, workers__standby_per_node=0,
        run__script=_script(tmp_path, bug),
    )  # fmt: skip

    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "failed"
    assert "NameError" in summary["reason"]
    assert "train.py" in summary["reason"]
    assert summary["attempts"] <= 2
    # None was due in storage: keepers were made to store what only they held.
    assert list(Path(config.run.directory, "checkpoints").glob("*/manifest.json"))


@pytest.mark.chaos
def test_exception_of_one_rank_is_survived_once(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A driver hiccup on one machine is not a bug of the script, and loses no state."""
    mark = tmp_path / "raised"
    bug = (
        f"mark = __import__('pathlib').Path({str(mark)!r})\n"
        "        if step.number == 12 and session.rank == 1 and not mark.exists():\n"
        "            mark.touch()\n"
        "            raise OSError('a hiccup')\n"
        # No fault at all: what rank 0 alone does between two steps, ten times as long as they.
        "        if step.number == 15 and session.rank == 0:\n"
        "            __import__('time').sleep(4)"
    )
    config = make_config(
        train__steps=20,
        train__warmup_steps=2,
        workers__max=2,
        workers__standby_per_node=0,
        snapshot__every_steps=5,
        run__script=_script(tmp_path, bug),
    )

    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["lost_steps"]) == ("exception", 0)
    assert set(incident["sources"]) <= {"live state", "live state of peers"}, incident
