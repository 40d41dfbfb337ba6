"""A run whose head is lost goes on on a second cluster: begun at once by hand, or by a watch."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.config import RunConfig
from tests.support.run_command import ACT_S_MAX, Command, command_for, everstep, wait
from ucp_core.storage import claim, open_store

pytestmark = pytest.mark.timeout(600)

#: So many commits of the first cluster after the loss of its head, and of the second one: retention
#: of each deletes everything that the other began with, if it may.
COMMITS = 6


@pytest.fixture
def command(make_config: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Command]:
    config = make_config(
        train__steps=100_000,
        workers__max=1,
        workers__standby_per_node=0,
        cluster__local_nodes=1,
        checkpoint__every_steps=2,
        checkpoint__keep=2,
    )
    with command_for(config, tmp_path) as made:
        yield made


def _committed(directory: str) -> dict[int, int]:
    """Return the attempt of every committed step."""
    found = {}
    for path in Path(directory, "checkpoints").glob("*/manifest.json"):
        # Retention may delete it at this moment.
        with suppress(FileNotFoundError):
            found[int(path.parent.name[5:])] = int(json.loads(path.read_text())["attempt"])
    return found


def _begun(directory: str) -> list[tuple[int, int]]:
    """Return ``(attempt, resume_step)`` of every attempt in the journal."""
    text = "".join(path.read_text() for path in sorted(Path(directory, "journal").glob("*")))
    lines = [json.loads(line) for line in re.findall(r".*\n", text)]
    starts = [line for line in lines if line["kind"] == "StartAttempt"]
    return [(line["attempt"], line["resume_step"]) for line in starts]


def _kill_head(host_pid: int) -> None:
    """SIGKILL what a head machine holds: Ray's head processes and the run's controller."""
    for process in psutil.Process(host_pid).children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            text = " ".join(words)
            if "gcs_server" in text or "--head" in words or text.startswith("ray::Controller"):
                process.kill()


@pytest.mark.chaos
def test_the_first_cluster_destroys_nothing_of_the_second(command: Command) -> None:
    """Seen: its trainers committed on, their retention deleted the step that the new claimant had
    named, and 4,070 committed steps were redone from step 0.
    """
    command.start("--detach").communicate(timeout=240)
    (first,) = command.clusters()
    (trainer,) = json.loads(everstep("status", command.directory, "--json").stdout)["workers"]
    wait(lambda: len(_committed(command.directory)) >= 2, "the first cluster commits")

    _kill_head(first.host_pid)
    at_loss = max(_committed(command.directory))
    wait(lambda: max(_committed(command.directory)) >= at_loss + COMMITS, "its trainers train on")
    at_resume = max(_committed(command.directory))
    second = command.start()
    wait(lambda: len(_begun(command.directory)) > 1, "the second cluster trains")

    attempt, resumed = _begun(command.directory)[-1]
    assert resumed >= at_resume, "what was committed is lost"
    wait(lambda: max(_committed(command.directory)) >= resumed + 2 * COMMITS, "the second commits")
    wait(lambda: not psutil.pid_exists(trainer["pid"]), "the first cluster's trainer ends")
    assert set(_committed(command.directory).values()) == {attempt}

    # The second one's controller lives, and is told by storage that a third one took over.
    claim(*open_store(command.directory), 3, {"token": "of the third", "host": "third-head"})
    _, errors = second.communicate(timeout=240)
    assert second.returncode == 4, errors
    assert "claim 3 was made at" in errors
    assert "third-head" in errors
    assert not Path(command.directory, "summary.json").exists()
    wait(lambda: len(command.clusters()) <= 1, "the second cluster ends with its command")


@pytest.mark.chaos
def test_a_watched_run_resumes_on_a_new_cluster_by_itself(command: Command) -> None:
    """`everstep run` ends with the step that is safe, and somebody had to start it again."""
    watch = command.start("--json", command="watch")
    (first,) = command.clusters()
    wait(lambda: len(_committed(command.directory)) >= 2, "it commits", watch)

    at_loss = max(_committed(command.directory))
    _kill_head(first.host_pid)
    wait(lambda: len(_begun(command.directory)) > 1, "it trains on another cluster", watch)

    assert _begun(command.directory)[-1][1] >= at_loss, "what was committed is lost"
    assert [entry.host_pid for entry in command.clusters()] != [first.host_pid]
    assert everstep("stop", command.directory, "--wait").returncode == 0
    output, errors = watch.communicate(timeout=ACT_S_MAX)
    assert watch.returncode == 0, errors
    assert json.loads(output)["outcome"] == "stopped"
    assert "trying again in 1 s" in errors
