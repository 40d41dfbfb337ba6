"""``everstep`` as a process of its own, and what is seen of its run from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.shell import LocalEntry, local_clusters

EVERSTEP = (sys.executable, "-c", "from orchestrator.cli.main import main; main()")
ACT_S_MAX = 240.0


class Command:
    """``everstep run`` of a small run on one simulated node, in a process of its own."""

    def __init__(self, config: RunConfig, tmp_path: Path) -> None:
        self.directory = config.run.directory
        self.path = tmp_path / "run.yaml"
        self.path.write_text(config.to_yaml())
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str, command: str = "run", **streams: Any) -> subprocess.Popen[str]:
        """Start it; return when a few steps are done."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        words = [*EVERSTEP, command, str(self.path), *options]
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self.process = subprocess.Popen(words, text=True, env=environment, **streams)
        wait(lambda: last_step(self.directory) >= 2, "it trains", self.process)
        return self.process

    def has_journaled(self, kind: str) -> bool:
        """Return whether the run's journal has an event of this kind."""
        segments = Path(self.directory, "journal").glob("*.jsonl")
        return any(f'"{kind}"' in segment.read_text() for segment in segments)

    def clusters(self) -> list[LocalEntry]:
        """Return the clusters that serve the run."""
        return [entry for entry in local_clusters() if entry.run_directory == self.directory]

    def summary(self) -> dict[str, Any]:
        """Return the run's summary."""
        document: dict[str, Any] = json.loads(Path(self.directory, "summary.json").read_text())
        return document


@contextmanager
def command_for(config: RunConfig, tmp_path: Path) -> Iterator[Command]:
    """Yield a command that can be started; end it afterwards, with all that it left."""
    made = Command(config, tmp_path)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.communicate()
        for entry in made.clusters():
            with suppress(ProcessLookupError):
                os.killpg(entry.host_pid, signal.SIGKILL)


def last_step(directory: str) -> int:
    """Return the last step that rank 0 has written down."""
    try:
        lines = Path(directory, "metrics/rank0.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def wait(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    deadline_s = time.monotonic() + ACT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        # One that detaches ends first, with success.
        assert process is None or process.poll() in (None, 0), (
            f"ended before: {what}: {process.communicate()}"
        )
        time.sleep(0.1)


def everstep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVERSTEP, *arguments], capture_output=True, text=True, timeout=ACT_S_MAX, check=False
    )


def everstep_each(*commands: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands that need not wait for one another, which mostly import and wait."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda words: everstep(*words), commands))
