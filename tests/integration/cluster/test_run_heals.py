"""Real training on simulated nodes, real signals; judged by what the run wrote."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver import diff_runs, export_run, plan_losses
from orchestrator.driver.faults import kill_node_of, member, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.errors import RunNotFoundError
from tests.support import train_told
from tests.support.attempts import finish
from tests.support.history import check_lost_steps, read_history
from tests.support.logged import in_tensorboard, in_wandb
from tests.support.reach import ACT_S_MAX, PACED, kill_keeper_of, num_training, reach
from tests.support.trainers import Run
from workers.settings import RunSettings, Settings

pytestmark = pytest.mark.timeout(900)

#: Settings of runs whose weights are compared: the undisturbed run is trained once for all.
COMPARED_STEPS = 80


def _has_standby(status: dict[str, Any], node: str) -> bool:
    waiting = [w for w in status["standbys"] if w["state"] == "ready"]
    return status["phase"] == "training" and any(w["node"] == node for w in waiting)


def _protected(run: Launched, step: int = 0, *, workers: int | None = None) -> dict[str, Any]:
    """Return the status once the loss of any node would be recovered from memory."""
    status = wait_for(
        run,
        lambda s: (
            s["phase"] == "training"
            and s["redundancy"]["node_losses_survived"] == 1
            and s["redundancy"]["step"] >= step
            and (workers is None or num_training(s) == workers)
        ),
        timeout_s=ACT_S_MAX,
    )
    assert status is not None, "the run ended before it was protected"
    return status


def _is_watched_by(pid: int, watcher: int) -> bool:
    """Return whether ``watcher`` has a descriptor that tells it of the end of ``pid``."""
    texts: list[str] = []
    for path in Path(f"/proc/{watcher}/fdinfo").iterdir():
        # It may have closed it meanwhile.
        with contextlib.suppress(OSError):
            texts.append(path.read_text())
    return any(re.search(rf"^Pid:\s+{pid}$", text, re.MULTILINE) for text in texts)


def _check_ends_at_once(status: dict[str, Any], node: str) -> None:
    """Assert that what runs on a node ends with its raylet, where the system lets it."""
    found = next(view for view in status["nodes"] if view["node"] == node)
    pids = [worker["pid"] for worker in status["workers"] if worker["node"] == node]
    own = os.pidfd_open(os.getpid())
    is_told = _is_watched_by(os.getpid(), os.getpid())
    os.close(own)
    for pid in (found["keeper_pid"], *(pid for pid in pids if pid)):
        assert not is_told or _is_watched_by(found["raylet_pid"], pid), (pid, found)


def _check_from_memory(
    config: RunConfig, incident: dict[str, Any], *, from_node_loss: bool = True
) -> None:
    """Assert that memory alone was needed, and cost no more than was not protected yet."""
    assert incident["sources"], "nothing was loaded"
    assert set(incident["sources"]) <= {"local memory", "peer memory", "parity"}, incident
    check_lost_steps(config.run.directory, incident, from_node_loss=from_node_loss)


def _finish(run: Launched) -> dict[str, Any]:
    summary = run.follow(lambda _: None)
    assert summary["outcome"] == "completed", summary["reason"]
    return summary


def _stop(run: Launched) -> dict[str, Any]:
    run.stop("all is seen")
    summary = run.follow(lambda _: None)
    assert summary["outcome"] == "stopped", summary["reason"]
    # A command that attaches in the moment in which the run ends sees its end.
    assert Launched(run.config, None, attach=True).follow(lambda _: None) == summary
    return summary


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], str]:
    """Return the directory of the same training in one process, without Ray, once per module."""
    known: dict[str, str] = {}

    def trained(config: RunConfig) -> str:
        # Alone, a script whose steps only take time need not take it.
        script = (
            replace(config.run, arguments=("0.0",))
            if config.run.script
            else RunSettings(directory="run")
        )
        key = repr((script, config.train))
        if key not in known:
            settings = Settings(
                run=script, model=config.model, data=config.data, train=config.train
            )
            with Run(tmp_path_factory.mktemp("undisturbed")) as alone:
                finish(alone, settings, num_workers=1)
                known[key] = str(alone.directory)
        return known[key]

    return trained


def _check_as_undisturbed(config: RunConfig, undisturbed: Callable[[RunConfig], str]) -> None:
    """Assert that every step and the weights are those of the same training in one process."""
    found = diff_runs(config.run.directory, undisturbed(config))
    assert found.equal, list(found.lines())
    assert found.steps == (1, config.train.steps)
    assert found.same_end, "a digest is missing"


def test_killed_worker_is_replaced_and_the_weights_end_equal(
    nodes: Any, make_config: Callable[..., RunConfig], undisturbed: Any, tmp_path: Path
) -> None:
    """A standby takes the dead worker's place; in deterministic mode nothing shows afterwards."""
    # After steps 20 and 40 it waits until all is seen; meanwhile the standbys have the processors.
    waits = {step: tmp_path / str(step) for step in (20, 40)}
    told = [f"{step + 1}:wait={path}" for step, path in waits.items()]
    config = make_config(
        run__script=train_told.__file__,
        run__arguments=json.dumps(told),
        train__steps=60,
        workers__max=2,
    )
    run = Launched(config, nodes)
    node = member(reach(run, 5), 1)["node"]
    before = wait_for(run, lambda s: _has_standby(s, node), timeout_s=ACT_S_MAX)
    assert before is not None, "the run ended before its standbys were ready"
    before = _protected(run, 20)
    with pytest.raises(RunNotFoundError, match="still trains, at step"):
        diff_runs(config.run.directory, config.run.directory)
    survivor = member(before, 0)["pid"]

    signal_rank(run, 1, signal.SIGKILL)
    waits[20].touch()
    after = reach(run, before["step"], workers=2, attempt=before["attempt"] + 1)
    waits[40].touch()
    summary = _finish(run)

    assert member(after, 0)["pid"] == survivor, "a healthy process was restarted"
    [incident] = summary["incidents"]
    # It dies while the run waits, so the keeper's report that it is gone may come first.
    assert incident["verdict"] == "dead"
    assert incident["guilty"] == [member(before, 1)["worker"]]
    _check_from_memory(config, incident, from_node_loss=False)
    _check_as_undisturbed(config, undisturbed)
    read_history(config.run.directory).check_exactly_once(config)

    train = replace(config.train, seed=config.train.seed + 1, steps=3)
    other = config.model_copy(update={"train": train})
    found = diff_runs(config.run.directory, undisturbed(other))
    assert found.first_step == 1
    assert found.numbers[0].name == "loss"


@pytest.mark.chaos
def test_lost_node_shrinks_the_run_and_its_return_grows_it(
    nodes: Any, make_config: Callable[..., RunConfig], undisturbed: Any
) -> None:
    """Raylet and all: Ray needs 12 s and more to notice, the run must not."""
    # Versions stored but not copied yet would come from there.
    config = make_config(
        train__steps=COMPARED_STEPS,
        workers__standby_per_node=0,
        checkpoint__every_steps=50_000,
        **PACED,
    )
    run = Launched(config, nodes)
    before = reach(run, 10, workers=4)
    before = _protected(run, before["step"])
    # A worker that outlives its node's keeper trains versions that are not copied.
    _check_ends_at_once(before, member(before, 3)["node"])

    kill_node_of(run, 3)
    reach(run, 11, workers=2, attempt=before["attempt"] + 1)
    nodes.add_node()
    reach(run, 12, workers=4)
    summary = _finish(run)

    # It grows twice where one worker of the new node is ready long before the other.
    kinds = [i["kind"] for i in summary["incidents"]]
    assert kinds in (["node_loss", "growth"], ["node_loss", "growth", "growth"])
    for incident in summary["incidents"]:
        _check_from_memory(config, incident)
    _check_as_undisturbed(config, undisturbed)
    read_history(config.run.directory).check_exactly_once(config)


@pytest.mark.chaos
def test_lost_node_is_computed_from_the_parities_of_its_group(
    nodes: Any, make_config: Callable[..., RunConfig], undisturbed: Any
) -> None:
    """No node has a copy of its versions; two nodes are left, which continue with copies."""
    nodes.add_node()
    config = make_config(
        train__steps=COMPARED_STEPS,
        cluster__cpus_per_worker=2,
        workers__max=3,
        workers__standby_per_node=0,
        snapshot__mechanism="parity",
        checkpoint__every_steps=50_000,
    )
    run = Launched(config, nodes)
    before = reach(run, 5, workers=3)
    before = _protected(run, before["step"])
    assert before["redundancy"]["mechanism"] == "ring parity"
    foretold = plan_losses(config.run.directory, [member(before, 1)["node"]])
    assert set(foretold.bytes_by_source) == {"local memory", "parity"}

    kill_node_of(run, 1)
    after = reach(run, before["step"] + 1, workers=2, attempt=before["attempt"] + 1)
    after = _protected(run, after["step"])
    assert after["redundancy"]["mechanism"] == "partner copy"
    summary = _finish(run)

    assert [i["kind"] for i in summary["incidents"]] == ["node_loss"]
    _check_from_memory(config, summary["incidents"][0])
    assert summary["incidents"][0]["sources"]["parity"] > 0
    _check_as_undisturbed(config, undisturbed)
    read_history(config.run.directory).check_exactly_once(config)


@pytest.mark.chaos
def test_processes_that_stop_or_die_in_turn_are_replaced_one_by_one(
    begin_endless: Callable[..., Launched],
) -> None:
    """Each has its own way to be missed, and each must leave the run as whole as it was before."""
    run = begin_endless(logging__tensorboard=True, logging__wandb="{project: p, mode: offline}")
    config = run.config
    stopped = _stop_a_worker(run)
    _end_the_controller(run, signal.SIGSTOP)
    _end_the_controller(run, signal.SIGTERM)
    attempts = [_kill_a_worker(run, after=_end_the_controller(run, signal.SIGKILL))]
    _lose_a_keeper(run, signal.SIGSTOP)
    attempts += [_kill_a_worker(run, after=_lose_a_keeper(run, signal.SIGKILL))]
    attempts += [_kill_a_keeper_and_a_worker(run)]
    exported = export_run(
        config.run.directory,
        f"{config.run.directory}-exported",
        format="huggingface",
        memory_bytes=64 << 20,
    )
    summary = _stop(run)

    losses = [i for i in summary["incidents"] if i["kind"] != "controller_restart"]
    hangs = [i for i in losses if i["kind"] == "hang" and i["attempt"] < attempts[0]]
    assert [i["guilty"] for i in hangs] == [[stopped]]
    found = [next(i for i in losses if i["attempt"] == attempt) for attempt in attempts]
    assert [i["kind"] for i in found] == ["crash", "crash", "crash"]
    # Only the other node's copy of the last version was left.
    for incident, from_node_loss in zip(found, (False, False, True), strict=True):
        _check_from_memory(config, incident, from_node_loss=from_node_loss)
    read_history(config.run.directory).check_exactly_once(config, summary["steps"])
    _check_logged_once(Path(config.run.directory), summary["steps"])
    assert 0 < exported["step"] <= summary["steps"]


def _check_logged_once(directory: Path, num_steps: int) -> None:
    """Assert that the loggers have one curve, whichever controllers wrote it."""
    logged = in_tensorboard(directory / "tensorboard")["train/loss"]
    assert [step for step, _ in logged] == list(range(1, num_steps + 1))
    names, rows = in_wandb(directory, num_steps)
    assert len(names) == 1
    # Lines that the service had not written when its controller was killed are lost.
    assert {step for step, _ in rows} <= set(range(1, num_steps + 1))
    assert rows[-1][0] == num_steps


def _stop_a_worker(run: Launched) -> str:
    """SIGSTOP leaves process, sockets and Ray's view alive: only its silence tells."""
    before = reach(run, 10, workers=4)
    victim = signal_rank(run, 2, signal.SIGSTOP)
    after = reach(run, 11, attempt=before["attempt"] + 1)
    reach(run, after["step"] + 15)
    return str(victim["worker"])


def _end_the_controller(run: Launched, number: signal.Signals) -> dict[str, Any]:
    """The workers' attempt must be the same afterwards: they were adopted, not restarted.

    Ray takes a controller that is only stopped for alive, and starts no other; and none for one
    that its own handler of SIGTERM ended.
    """
    before = _protected(run, workers=4)
    pid = run.controller_pid(timeout_s=ACT_S_MAX)
    os.kill(pid, number)
    after = reach(run, before["step"] + 5)
    assert run.controller_pid(timeout_s=ACT_S_MAX) != pid
    assert after["attempt"] == before["attempt"]
    return _protected(run, after["step"], workers=4)


def _lose_a_keeper(run: Launched, number: signal.Signals) -> dict[str, Any]:
    """The trainers hold their arenas too: the next keeper must take them over, and copies again.

    Ray takes a keeper that is only stopped for alive.
    """
    before = _protected(run, workers=4)
    lost = kill_keeper_of(run, 1, number)
    is_replaced = wait_for(
        run,
        lambda s: not {lost, None, 0} & {view["keeper_pid"] for view in s["nodes"]},
        timeout_s=ACT_S_MAX,
    )
    assert is_replaced is not None, "the run ended without another keeper"
    after = _protected(run, is_replaced["step"] + 20, workers=4)
    assert after["attempt"] == before["attempt"], "training was disturbed"
    return after


def _kill_a_worker(run: Launched, *, after: dict[str, Any]) -> int:
    """Return the attempt that ended with it."""
    signal_rank(run, 1, signal.SIGKILL)
    reach(run, after["step"] + 1, attempt=after["attempt"] + 1)
    return int(after["attempt"])


def _kill_a_keeper_and_a_worker(run: Launched) -> int:
    """Both holders of an arena are gone. Return the attempt that ended with it.

    Growth may follow, through storage: until it the run went on while a keeper was away.
    """
    before = _protected(run, workers=4)
    kill_keeper_of(run, 1)
    return _kill_a_worker(run, after=before)


@pytest.mark.chaos
def test_copies_of_the_model_lose_a_node_and_get_it_back(
    nodes: Any, make_config: Callable[..., RunConfig]
) -> None:
    """HSDP: whichever ranks go, one full copy must be left to save, and both must load it."""
    config = make_config(
        train__steps=COMPARED_STEPS,
        train__deterministic=False,
        parallel__dp_replicate=2,
        checkpoint__every_steps=50_000,
    )
    run = Launched(config, nodes)
    before = reach(run, 10, workers=4)

    kill_node_of(run, 3)
    reach(run, 11, workers=2, attempt=before["attempt"] + 1)
    nodes.add_node()
    reach(run, 12, workers=4)
    summary = _finish(run)

    assert before["redundancy"]["mechanism"] == "redundant copy", before["redundancy"]
    assert summary["incidents"][0]["layout_before"] == "dp_replicate=2 x dp_shard=2"
    _check_from_memory(config, summary["incidents"][0])
    history = read_history(config.run.directory)
    history.check_exactly_once(config)
    assert summary["final_loss"] < history.lines[0]["loss"] - 1.0, "it did not learn"


def test_a_machine_that_computes_something_wrong_is_left_and_the_weights_end_equal(
    nodes: Any, make_config: Callable[..., RunConfig], undisturbed: Any, tmp_path: Path
) -> None:
    """From step 12 on one process flips a bit in a matmul; the mean gradient takes it to all.

    The check of step 10 was the last that agreed. Versions behind step 9 are not resumed from.
    """
    mark = tmp_path / "errs"
    config = make_config(
        run__script=Path(__file__).parents[2] / "support/train_corrupt.py",
        run__arguments=["matmul:12:1:5:22", f"mark={mark}", "slow=0.02"],
        train__steps=30,
        train__recheck=5,
        checkpoint__every_steps=3,
        workers__max=3,
    )
    run = Launched(config, nodes)
    before = reach(run, 3, workers=3)
    bad = member(before, 1)

    after = reach(run, 11, attempt=before["attempt"] + 1)
    summary = _finish(run)

    assert int(mark.read_text()) == bad["pid"], "another one was to err"
    assert bad["node"] not in {member(after, rank)["node"] for rank in range(num_training(after))}
    incident = next(each for each in summary["incidents"] if each["kind"] == "corrupt")
    assert incident["guilty"] == [bad["worker"]]
    assert "rank 1 computed another gradient of micro-batch" in incident["evidence"]
    assert "The run goes back to its newest version up to step 9" in incident["evidence"]
    _check_as_undisturbed(config, undisturbed)
