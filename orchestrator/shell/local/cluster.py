"""A Ray cluster of simulated nodes on this machine.

Each node is a real raylet with its own worker processes: killing one is like killing a machine.
``python -m orchestrator.shell.local.cluster`` hosts a cluster in a separate process. That host ends
with the command that started it, however that command ends, unless the cluster is detached. It also
ends when the run's directory is deleted.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from orchestrator.errors import CapacityError
from orchestrator.report import SUMMARY
from orchestrator.shell.local.registry import (
    ENTRY,
    PREFIX,
    LocalEntry,
    own_folder,
    remove_traces,
)
from ucp_core.errors import StorageError
from ucp_core.numerics import counted
from ucp_core.storage import join, open_store, retried
from workers.launchers import ignore_schedulers
from workers.process import gpus_of_node, tuned

#: Ray notices the death of a simulated node after about 3 s instead of 12 s to 62 s. The run does
#: not wait for that, but the entry of the dead node must be gone soon in case the node returns. A
#: killed raylet refuses the check at once. One that does not answer is only slow, so the timeout is
#: long.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 30_000,
    "health_check_failure_threshold": 3,
    # Only Ray's dashboard, which is not started, shows these. Without them an idle process needs an
    # eighth less processor time.
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
}
#: The head holds no trainers. With Ray's default niceness of 15 its processes would queue behind
#: the trainers on this machine.
HEAD_ENVIRONMENT = {"RAY_worker_niceness": "0"}
#: Small, because the run moves no data through Ray's object store.
OBJECT_STORE_BYTES = 80 * 2**20
START_S_MAX = 240.0
#: Ray gives a node 30 s to start, which is too short on a busy machine.
STARTS_MAX = 3
#: How often the host checks its starter and the run.
LOOK_S = 0.5
#: A connection within this machine takes microseconds.
_CONNECT_S_MAX = 3.0

_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def _environment() -> dict[str, str]:
    """Return the environment variables for the nodes of a cluster, and their workers."""
    return {**_RAY_ENVIRONMENT, **tuned(os.environ)}


class _SimulatedNodes:
    """Simulated nodes that this process starts and ends, beside a head without workers."""

    def __init__(self, *, num_nodes: int, cpus_per_node: int, gpus: Sequence[str]) -> None:
        os.environ.update(_environment())
        from ray.cluster_utils import Cluster

        self._cpus = cpus_per_node
        self.cluster = Cluster(
            initialize_head=True,
            shutdown_at_exit=False,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_system_config": SYSTEM_CONFIG,
                "env_vars": HEAD_ENVIRONMENT,
            },
        )
        #: The simulated nodes by their Ray ids, oldest first.
        self.running: dict[str, Any] = {}
        self._num_nodes, self._gpus = num_nodes, tuple(gpus)
        self._places: dict[str, int] = {}
        for _ in range(num_nodes):
            self.add_node()

    def add_node(self) -> str:
        """Start one more node and return its Ray id. This blocks for one to two seconds."""
        taken = {self._places[node] for node in self.running}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        gpus = gpus_of_node(place % max(1, self._num_nodes), self._num_nodes, self._gpus)
        node = self.cluster.add_node(
            wait=False,
            num_cpus=self._cpus,
            num_gpus=len(gpus),
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={"CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        )
        self.running[node.node_id], self._places[node.node_id] = node, place
        return str(node.node_id)

    def kill_node(self, node: str) -> None:
        """SIGKILL the raylet of ``node``, which ends its workers."""
        infos = list(itertools.chain(*self.running.pop(node).all_processes.values()))
        for info in infos:
            info.process.kill()
        for info in infos:
            # Until it is reaped, a dead raylet counts as alive and its workers continue to train.
            info.process.wait()


class HostedCluster:
    """A local cluster in a separate process, reached over a unix socket.

    It ends with this process, however that ends, unless it is detached.

    Args:
        num_nodes: Nodes beside the head.
        cpus_per_node: Workers that fit on each.
        gpus: This machine's GPUs, which the nodes divide among themselves.

    Raises:
        CapacityError: The cluster does not start.
    """

    def __init__(self, *, num_nodes: int, cpus_per_node: int, gpus: Sequence[str] = ()) -> None:
        require_loopback()
        deadline_s = time.monotonic() + START_S_MAX
        for number in range(1, STARTS_MAX + 1):
            self._start(num_nodes, cpus_per_node, gpus)
            try:
                address = self._wait_ready(deadline_s)
            except BaseException:
                self.kill()
                raise
            if address:
                self.address = address
                return
            kept = (self._folder / "log").replace(own_folder() / "failed-start.log")
            self.kill()
            if number == STARTS_MAX or time.monotonic() >= deadline_s:
                tried = f"tried {counted(number, 'time')}"
                raise CapacityError(
                    f"the simulated nodes did not start, {tried}: {_last_words(kept)}. The "
                    f"output of their processes is in {kept}; `everstep doctor` checks this "
                    "machine"
                )

    @property
    def is_alive(self) -> bool:
        """Return whether its host still runs."""
        return self._process.poll() is None

    def nodes(self) -> list[str]:
        """Return the Ray ids of the simulated nodes, oldest first."""
        return list(self._ask("nodes"))

    def add_node(self) -> str:
        """Start one more node and return its Ray id."""
        return str(self._ask("add_node"))

    def kill_node(self, node: str) -> None:
        """Kill ``node`` as a power cut would."""
        self._ask("kill_node", node)

    def serve_run(self, directory: str, *, detached: bool) -> None:
        """Tie the cluster to the run in ``directory``: it ends when the directory is deleted.

        A detached cluster outlives this process and ends when the run is over.
        """
        self._ask("serve_run_detached" if detached else "serve_run", directory)

    def shutdown(self) -> None:
        """Leave the cluster, then stop it and its host; at once if a signal interrupts the wait."""
        try:
            # Ray ends a process that stays connected a minute after its cluster is gone.
            ray.shutdown()
            with contextlib.suppress(OSError, RuntimeError):
                self._ask("shutdown")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        finally:
            # Even if the host has ended: a failed shutdown leaves Ray's daemons behind.
            self.kill()

    def kill(self) -> None:
        """End the cluster at once, with all its processes."""
        # A partly killed cluster accepts no command; Ray's daemons are in the host's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        remove_traces(self._folder)

    def _start(self, num_nodes: int, cpus_per_node: int, gpus: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=own_folder()))
        # -P: a user's file in the working directory, such as attrs.py, must not shadow a library.
        command = [sys.executable, "-P", "-m", "orchestrator.shell.local.cluster"]
        command += [str(self._folder), str(os.getpid())]
        command += [str(num_nodes), str(cpus_per_node), *gpus]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the command alone.
                # Ray's default is a folder that only the first user of a machine can write.
                env={**os.environ, **_environment(), "RAY_TMPDIR": str(own_folder())},
            )

    def _wait_ready(self, deadline_s: float) -> str:
        """Return the cluster's address once it is up; "" if it ended or took too long."""
        while time.monotonic() < deadline_s and self.is_alive:
            with contextlib.suppress(OSError):
                return str(self._ask("address"))
            time.sleep(0.1)
        return ""

    def _ask(self, command: str, argument: str = "") -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._folder / "control"))
            connection.sendall(json.dumps([command, argument]).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline() or b'["error", "the cluster host went away"]')
        if answer[0] == "error":
            raise RuntimeError(answer[1])
        return answer[1]


class _Host:
    """The process of a hosted cluster: executes commands, and ends when it is no longer needed."""

    def __init__(self, folder: Path, starter_pid: int) -> None:
        self._folder = folder
        self._entry = LocalEntry(address="", host_pid=os.getpid(), starter_pid=starter_pid)
        #: The run's summary at the start; only another one means that the run is over.
        self._old_summary: bytes | None = None
        #: The run's directory, kept open while this process lives so that its inode is not reused.
        self._directory = -1
        threading.Thread(target=self._end_when_unneeded, name="unneeded", daemon=True).start()

    def serve(self, num_nodes: int, cpus_per_node: int, gpus: Sequence[str]) -> None:
        """Host a cluster until a command shuts it down."""
        self._nodes = _SimulatedNodes(num_nodes=num_nodes, cpus_per_node=cpus_per_node, gpus=gpus)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._folder / "control"))
                self._register(address=str(self._nodes.cluster.address))
                listener.listen()
                command = ""
                while command != "shutdown":
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rwb") as stream:
                        line = stream.readline()
                        if line:
                            command, argument = json.loads(line)
                            answer = self._perform(command, argument)
                            stream.write(json.dumps(answer).encode() + b"\n")
        finally:
            self._nodes.cluster.shutdown()
            remove_traces(self._folder)

    def _perform(self, command: str, argument: str) -> list[Any]:
        try:
            match command:
                case "address":
                    return ["ok", str(self._nodes.cluster.address)]
                case "nodes":
                    return ["ok", list(self._nodes.running)]
                case "add_node":
                    return ["ok", self._nodes.add_node()]
                case "kill_node":
                    self._nodes.kill_node(argument)
                case "serve_run" | "serve_run_detached":
                    self._old_summary = _content(join(argument, SUMMARY))
                    if "://" not in argument:
                        self._directory = retried(lambda: os.open(argument, os.O_RDONLY))
                    self._register(run_directory=argument, is_detached=command != "serve_run")
                case "shutdown":
                    pass
                case _:
                    return ["error", f"unknown command {command!r}"]
        except Exception as error:  # noqa: BLE001  the edge: it becomes the asker's error
            return ["error", repr(error)]
        return ["ok", None]

    def _register(self, **changes: Any) -> None:
        self._entry = replace(self._entry, **changes)
        draft = self._folder / f"{ENTRY}.new"
        draft.write_text(json.dumps(asdict(self._entry)))
        draft.replace(self._folder / ENTRY)

    def _end_when_unneeded(self) -> None:
        while not self._is_unneeded():
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def _is_unneeded(self) -> bool:
        entry = self._entry
        if not entry.is_detached and os.getppid() != entry.starter_pid:
            return True
        if not entry.run_directory:
            return False
        if self._directory >= 0 and not is_there(self._directory, entry.run_directory):
            return True
        return entry.is_detached and is_over(entry.run_directory, self._old_summary)


def require_loopback() -> None:
    """Raise ``CapacityError`` if the machine lacks 127.0.0.1: Ray would wait for it for 30 s."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECT_S_MAX).close()
    except OSError as error:
        raise CapacityError(
            f"simulated nodes need 127.0.0.1 on this machine, even with IPv6: {error}. Add it "
            "with `ip address add 127.0.0.1/8 dev lo`, or name a cluster with --address"
        ) from error


def _last_words(log: Path) -> str:
    """Return the line with the error, which is the last one outside a stack."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.strip() and not line.startswith((" ", "\t"))]
    return said[-1].rstrip(".") if said else "there is no output"


def is_there(directory: int, path: str) -> bool:
    """Return whether the open ``directory`` is still at ``path``.

    The path alone is not enough: a controller creates the folders that it writes to.
    """
    try:
        return os.path.samestat(os.fstat(directory), Path(path).stat())
    except FileNotFoundError:
        return False


def is_over(directory: str, old_summary: bytes | None) -> bool:
    """Return whether the run has written another summary than ``old_summary``."""
    return _content(join(directory, SUMMARY)) not in (None, old_summary)


def _content(url: str) -> bytes | None:
    """Return the content of a file; None if it does not exist or cannot be read now."""
    try:
        store, path = open_store(url)
        return store.read(path) if store.exists(path) else None
    except StorageError:
        return None


if __name__ == "__main__":
    ignore_schedulers()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    try:
        _, folder, starter_pid, nodes, cpus, *gpus = sys.argv
        _Host(Path(folder), int(starter_pid)).serve(int(nodes), int(cpus), gpus)
    except Exception:
        # Print it now, because the end of our process group ends this process, too.
        traceback.print_exc()
        raise
    finally:
        if os.getpgrp() == os.getpid():
            # Daemons that Ray did not stop are in our group, and nothing else ends them.
            os.killpg(0, signal.SIGKILL)
