"""How long a run on simulated nodes lives: as long as its command, unless it is detached."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from tests.support.reach import PACED
from tests.support.run_command import (
    ACT_S_MAX,
    Command,
    command_for,
    everstep,
    everstep_each,
    last_step,
    wait,
)

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).parents[2]


@pytest.fixture
def command(make_config: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Command]:
    config = make_config(
        train__steps=100_000,
        workers__max=1,
        workers__standby_per_node=0,
        cluster__local_nodes=1,
        snapshot__every_steps=0,
        **PACED,
    )
    with command_for(config, tmp_path) as made:
        yield made


def _check_stops(command: Command, number: signal.Signals, code: int) -> None:
    """Send a signal to the command, and assert that it stops the run and takes the cluster."""
    process = command.process
    assert process is not None
    process.send_signal(number)
    output, errors = process.communicate(timeout=ACT_S_MAX)

    assert process.returncode == code, errors
    assert json.loads(output)["outcome"] == "stopped"
    steps = command.summary()["steps"]
    assert Path(command.directory, f"checkpoints/step-{steps:08d}/manifest.json").exists()
    assert "the same command resumes from there" in errors
    assert command.clusters() == []


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_signal_stops_the_run_at_a_step_and_takes_its_cluster(
    command: Command, number: signal.Signals, code: int
) -> None:
    """It lived on hidden, trained for ever, and nothing listed it."""
    command.start("--json")
    assert len(command.clusters()) == 1

    _check_stops(command, number, code)


@pytest.mark.chaos
def test_ctrl_c_again_ends_it_at_once(command: Command) -> None:
    """A run that does not get to a step boundary must not hold its terminal."""
    process = command.start()
    (cluster,) = command.clusters()
    (worker,) = json.loads(everstep("status", command.directory, "--json").stdout)["workers"]
    # A step that never ends.
    os.kill(worker["pid"], signal.SIGSTOP)

    process.send_signal(signal.SIGINT)
    wait(lambda: command.has_journaled("StopRequested"), "it is asked to stop", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 130, errors
    assert "is safe in storage" in errors or "No step is in storage" in errors
    assert command.clusters() == []
    assert not Path(f"/proc/{cluster.host_pid}").exists()


@pytest.mark.chaos
def test_an_outage_of_storage_does_not_end_the_command_and_ctrl_c_does(command: Command) -> None:
    """It ended at the first look that failed, with the simulated nodes and all that memory held."""
    process = command.start("--json")
    assert len(command.clusters()) == 1
    summary, before = Path(command.directory, "summary.json"), last_step(command.directory)
    # Reading it is an error now, and not a sign that it is missing.
    summary.mkdir()
    wait(lambda: last_step(command.directory) > before + 10, "it trains on", process)
    summary.rmdir()

    _check_stops(command, signal.SIGINT, 130)


@pytest.mark.chaos
def test_output_without_a_reader_stops_the_run(command: Command) -> None:
    """As with `everstep run ... | head`: a person has seen enough, or the terminal is gone."""
    read, write = os.pipe()
    process = command.start(stdout=write)
    os.close(write)

    os.close(read)
    _, errors = process.communicate(timeout=ACT_S_MAX)

    assert process.returncode == 129, errors
    assert command.summary()["outcome"] == "stopped"
    assert command.clusters() == []


@pytest.mark.chaos
def test_the_cluster_of_a_killed_command_ends(command: Command) -> None:
    """No other process would end it."""
    process = command.start()

    process.kill()

    wait(lambda: command.clusters() == [], "the cluster ends with its command")


def test_a_detached_run_is_listed_and_stopped(command: Command) -> None:
    """A user cannot stop a run that no command shows."""
    process = command.start("--detach")
    output, _ = process.communicate(timeout=ACT_S_MAX)
    (cluster,) = command.clusters()

    answers = everstep_each(("list", "--json"), ("list", "--address", cluster.address, "--json"))
    listed, there = (json.loads(answer.stdout)["runs"] for answer in answers)
    stopped = everstep("stop", command.directory, "--wait", "--json")

    assert process.returncode == 0
    assert f"everstep stop {command.directory}" in output
    (run,) = [run for run in listed if run["directory"] == command.directory]
    assert run["phase"] == "training"
    assert run["workers"] == 1
    assert "detached" in run["note"]
    assert [run["directory"] for run in there] == [command.directory]
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout)["outcome"] == "stopped"
    wait(lambda: command.clusters() == [], "a detached cluster ends with its run")


@pytest.mark.chaos
def test_a_deleted_run_directory_ends_the_cluster(command: Command) -> None:
    """A user who deletes a run does not want it trained."""
    process = command.start("--detach")
    process.communicate(timeout=ACT_S_MAX)

    Path(command.directory).rename(f"{command.directory}.deleted")

    wait(lambda: command.clusters() == [], "the cluster ends with the directory")


@pytest.mark.chaos
def test_a_command_whose_cluster_is_gone_says_which_step_is_safe(command: Command) -> None:
    """It looped for ever and said that training goes on."""
    process = command.start()
    wait(lambda: any(Path(command.directory, "checkpoints").glob("*/manifest.json")), "a save")
    (cluster,) = command.clusters()

    os.killpg(cluster.host_pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 3, errors
    assert f"the Ray cluster at {cluster.address} is gone" in errors
    assert "is safe in storage; the same command resumes from it" in errors


@pytest.mark.chaos
def test_a_detached_run_is_ended_by_force_with_its_cluster(command: Command) -> None:
    """The last resort for a run that does not stop."""
    command.start("--detach").communicate(timeout=ACT_S_MAX)

    forced = everstep("stop", command.directory, "--force")

    assert forced.returncode == 0, forced.stderr
    assert command.clusters() == []


@pytest.mark.chaos
def test_a_process_leaves_a_cluster_that_ends_as_it_connects(command: Command) -> None:
    """Ray's own listener held it up for a minute, and then ended it with code 1."""
    command.start("--detach").communicate(timeout=ACT_S_MAX)
    (cluster,) = command.clusters()
    program = (
        "import ray; from orchestrator.shell import connect_ray, kill_local_cluster;"
        f"connect_ray({cluster.address!r}); kill_local_cluster({command.directory!r});"
        "ray.shutdown()"
    )

    left = subprocess.run([sys.executable, "-c", program], timeout=50, check=False)

    assert left.returncode == 0
