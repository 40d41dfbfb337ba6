"""A run whose head is lost goes on at once on a second cluster, while the first one trains on."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.config import RunConfig
from tests.support.run_command import Command, everstep, wait

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
    made = Command(config, tmp_path)
    yield made
    for entry in made.clusters():
        with suppress(ProcessLookupError):
            os.killpg(entry.host_pid, signal.SIGKILL)


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


def test_the_first_cluster_destroys_nothing_of_the_second(command: Command) -> None:
    """Seen: its trainers committed on, their retention deleted the step that the new life had
    named, and 4,070 committed steps were begun anew from step 0.
    """
    command.start("--detach").communicate(timeout=240)
    (first,) = command.clusters()
    (trainer,) = json.loads(everstep("status", command.directory, "--json").stdout)["workers"]
    wait(lambda: len(_committed(command.directory)) >= 2, "the first cluster commits")

    _kill_head(first.host_pid)
    at_loss = max(_committed(command.directory))
    wait(lambda: max(_committed(command.directory)) >= at_loss + COMMITS, "its trainers train on")
    at_resume = max(_committed(command.directory))
    command.start("--detach").communicate(timeout=240)
    wait(lambda: len(_begun(command.directory)) > 1, "the second cluster trains")

    attempt, resumed = _begun(command.directory)[-1]
    assert resumed >= at_resume, "what was committed is lost"
    wait(lambda: max(_committed(command.directory)) >= resumed + 2 * COMMITS, "the second commits")
    wait(lambda: not psutil.pid_exists(trainer["pid"]), "the first cluster's trainer ends")
    assert set(_committed(command.directory).values()) == {attempt}
    assert everstep("stop", command.directory, "--wait").returncode == 0
