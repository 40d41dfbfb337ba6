"""The processes of one job: those of the head, of two simulated nodes, and the job's own.

A node is the processes that carry its mark in their environment, their descendants, and the
sessions of its commands. Losing it is SIGKILL for all of them.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from tests.benchmarks.peers.events import LAST

FOLDER: Final = Path(__file__).resolve().parent
REPOSITORY: Final = FOLDER.parents[2]
ENVIRONMENTS: Final = REPOSITORY / ".venv-peers"
NODES: Final = ("n0", "n1")
HEAD: Final = "head"
JOB: Final = "job"
HEAD_S_MAX, STOP_S_MAX = 60.0, 30.0
#: Ray gives a node 30 s to start, which is too short on a busy machine.
STARTS_MAX: Final = 5
_PLAIN: Final = {
    "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
    "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A peer as its ``arm.toml`` sets it up."""

    name: str  #: Name of the folder, with "-" and the variant if there is one.
    folder: Path  #: Has ``arm.toml`` and ``train.py``.
    about: str  #: The settings, in a few words.
    package: str  #: The package whose version belongs to each figure.
    environment: str  #: Its name below ``ENVIRONMENTS``; "" for the one that runs the benchmark.
    faults: tuple[str, ...] = ()  #: Those that it is made for; () for all.
    head: tuple[str, ...] = ()  #: Commands of services that no fault touches.
    node: tuple[str, ...] = ()  #: Commands on each node, also when a node comes back.
    job: str = ""  #: The command that trains; "" if those of the nodes do.
    #: The text that a head and a node print once they are up; "" for a head that is up when it
    #: listens on its port. Nodes start one after the other then.
    ready: str = ""
    stop: str = ""  #: The command that ends it in order; "" for SIGTERM.
    variables: dict[str, str] = field(default_factory=dict)  #: For all of its commands.
    skipped: str = ""  #: Why it is not run; "" if it is.

    @property
    def binaries(self) -> Path:
        """Return where its commands are."""
        if not self.environment:
            return Path(sys.executable).parent
        return ENVIRONMENTS / self.environment / "bin"

    @property
    def script(self) -> Path:
        """Return what a user of the peer would write."""
        return self.folder / "train.py"

    def version(self) -> str:
        """Return the version of its package, "" if it is not installed."""
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        python = self.binaries / "python"
        if not python.exists():
            return ""
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, cwd=FOLDER
        )
        return done.stdout.strip()


def arms(folder: Path = FOLDER) -> dict[str, Arm]:
    """Return all arms by name: each folder with an ``arm.toml``, and its variants."""
    found: dict[str, Arm] = {}
    for path in sorted(folder.glob("*/arm.toml")):
        told: dict[str, Any] = tomllib.loads(path.read_text())
        plain = _with(
            Arm(
                name=path.parent.name,
                folder=path.parent,
                about=told["about"],
                package=told["package"],
                environment=told.get("environment", path.parent.name),
                faults=tuple(told.get("faults", ())),
            ),
            told.get("commands", {}) | {k: told[k] for k in ("variables", "skipped") if k in told},
        )
        found[plain.name] = plain
        for name, changes in told.get("variants", {}).items():
            found[f"{plain.name}-{name}"] = _with(plain, {"name": f"{plain.name}-{name}"} | changes)
    return found


def _with(arm: Arm, changes: dict[str, Any]) -> Arm:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}
    return replace(arm, **values)


class Job:
    """One job of an arm on two simulated nodes, with a directory of its own."""

    def __init__(self, arm: Arm, directory: Path) -> None:
        self.arm = arm
        self.events = directory / "events"  #: The folder of its processes' lines.
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        self._mark = f"PEERS_RUN={directory}-{time.time_ns()}"
        # Sockets below it have names of 107 bytes at most.
        self._short = tempfile.mkdtemp(prefix="peers-", dir="/tmp")
        self._port = _free_port()
        self._commands: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.events.mkdir(parents=True)

    def start(self) -> None:
        """Start the head, the nodes, and the job."""
        self._start(HEAD, self.arm.head)
        if self.arm.head:
            self._wait_for_head()
        for node in NODES:
            self.start_node(node)
        self._start(JOB, [self.arm.job] if self.arm.job else [])

    def start_node(self, node: str) -> None:
        """Start the commands of a node, for the first time or again."""
        self._start(node, self.arm.node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once."""
        kill(self.owned(node))

    def stop(self) -> None:
        """End the job in order, as a scheduler does: all its nodes stay, or all its commands go."""
        if self.arm.stop:
            subprocess.run(
                self._words(self.arm.stop, ""), env=self._variables(JOB), check=False,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=2 * STOP_S_MAX,
            )  # fmt: skip
        names = [JOB] if self.arm.job else list(NODES)
        commands = [one for name in names for one in self._commands.get(name, [])]
        for one in commands:
            with contextlib.suppress(ProcessLookupError):
                one.terminate()
        deadline_s = time.monotonic() + STOP_S_MAX
        for one in commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline_s - time.monotonic()))
        kill({pid for name in names for pid in self.owned(name)})

    def resume(self) -> None:
        """Start again what ``stop`` ended."""
        if self.arm.job:
            self._start(JOB, [self.arm.job])
        else:
            for node in NODES:
                self.start_node(node)

    def end_at(self, step: int) -> None:
        """Have the job end with a step, which must be ahead of all its processes."""
        part = self._directory / f"{LAST}.part"
        part.write_text(str(step))
        part.rename(self._directory / LAST)

    def poll(self) -> int | None:
        """Return how the job ended: the worst exit code of its commands; None while it runs.

        Commands that a fault killed do not count beside others.
        """
        names = [JOB] if self.arm.job else list(NODES)
        codes = [one.poll() for name in names for one in self._commands.get(name, [])]
        if any(code is None for code in codes):
            return None
        ended = [abs(code) for code in codes if code not in (None, -signal.SIGKILL)]
        return max(ended, default=signal.SIGKILL.value)

    def owned(self, node: str) -> set[int]:
        """Return the processes of a node, of the head, or of the job's own command."""
        sessions = {one.pid for one in self._commands.get(node, [])}
        marks = {self._mark.encode(), f"PEERS_NODE={node}".encode()}
        found = set()
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if os.getsid(pid) in sessions or marks <= set(environment):
                    found.add(pid)
        for pid in list(found):
            with contextlib.suppress(psutil.Error):
                found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return found

    def end(self) -> None:
        """Kill whatever is left, and delete what only sockets and checkpoints need."""
        # The second time finds processes that were started during the kill.
        for _ in range(2):
            kill({pid for name in (JOB, *NODES, HEAD) for pid in self.owned(name)})
        for commands in self._commands.values():
            for one in commands:
                one.wait()
        shutil.rmtree(self._short, ignore_errors=True)
        shutil.rmtree(self._directory / "checkpoints", ignore_errors=True)
        shutil.rmtree(self._directory / "run", ignore_errors=True)

    def _start(self, node: str, commands: Iterable[str]) -> None:
        (self._directory / f"{node}-0.log").touch()
        for _ in range(STARTS_MAX):
            before = self._num_ready(node)
            self._commands[node] = [
                self._open(self._directory / f"{node}-{number}.log", command, node)
                for number, command in enumerate(commands)
            ]
            if not self.arm.ready or node == JOB or self._is_up(node, before):
                return
        raise RuntimeError(f"{self.arm.name}: {node} is not up; its logs are in {self._directory}")

    def _is_up(self, node: str, before: int) -> bool:
        """Wait until a node has printed once more that it is up, or has ended."""
        while self._num_ready(node) == before:
            if self._commands[node][0].poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def _open(self, path: Path, command: str, node: str) -> subprocess.Popen[bytes]:
        with path.open("ab") as log:
            return subprocess.Popen(
                self._words(command, node),
                env=self._variables(node),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _words(self, command: str, node: str) -> list[str]:
        number = NODES.index(node) if node in NODES else 0
        values = {
            "port": self._port, "folder": self.arm.folder, "directory": self._directory,
            "short": self._short, "first": 2 * number, "second": 2 * number + 1,
        }  # fmt: skip
        words = shlex.split(command)
        for name, value in values.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        binary = self.arm.binaries / words[0]
        return [str(binary) if binary.exists() else words[0], *words[1:]]

    def _variables(self, node: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PEERS_"))}
        name, _, value = self._mark.partition("=")
        return {
            **kept, **_PLAIN, **self.arm.variables, name: value, "PEERS_NODE": node,
            "PEERS_DIRECTORY": str(self._directory), "PEERS_PORT": str(self._port),
            "PATH": f"{self.arm.binaries}:{os.environ['PATH']}",
        }  # fmt: skip

    def _wait_for_head(self) -> None:
        deadline_s = time.monotonic() + HEAD_S_MAX
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.arm.name}: nothing listens on port {self._port}")
            time.sleep(0.1)

    def _num_ready(self, node: str) -> int:
        """Return how often a node has printed that it is up."""
        text = (self._directory / f"{node}-0.log").read_text(errors="replace")
        return text.count(self.arm.ready)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes, those that are gone left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
