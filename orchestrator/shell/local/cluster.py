"""A Ray cluster of simulated nodes on this machine, for trying things and for tests.

Every node is a real raylet with its own worker processes; killing one is killing a machine.
``python -m orchestrator.shell.local.cluster`` hosts a cluster in a process of its own, so that
it outlives the command that asked for it: killing the driver must not stop a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import ray

from ucp_core.errors import StorageError
from ucp_core.storage import open_store
from workers.process import tuned

#: A simulated machine's death is noticed by Ray after about 3 s instead of 12 s to 62 s; the
#: run does not wait for it, but a returned node must not meet its own ghost for long. A killed
#: raylet refuses the check at once, so one that does not answer is only slow: it writes its log
#: with the disk that tests and trainers fill, and was given up there with 3 s a check.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 30_000,
    "health_check_failure_threshold": 3,
    # What only Ray's dashboard shows, which is not started here: statistics of event loops, states
    # of tasks, metrics. All processes share this machine, and an idle one takes an eighth less.
    "event_stats": False,
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
}
#: A head is a machine of its own, and holds no trainers: what starts there does not queue behind
#: them, which Ray's niceness of 15 for all workers would make it do on a machine that all share.
HEAD_ENVIRONMENT = {"RAY_worker_niceness": "0"}
#: Small: the run moves nothing through Ray's object store.
OBJECT_STORE_BYTES = 80 * 2**20
START_S_MAX = 240.0
#: Ray gives a node 30 s to start, which on a machine with ten other things to do is too short.
STARTS_MAX = 3

#: Set in a host that outlives its starter.
_lives_on = threading.Event()

_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def _environment() -> dict[str, str]:
    """Return what this process adds for the nodes that it starts, which their workers inherit."""
    return {**_RAY_ENVIRONMENT, **tuned(os.environ)}


class LocalCluster:
    """Simulated nodes in this process's care.

    Args:
        num_nodes: Nodes beside the head, which holds no workers.
        cpus_per_node: Workers that fit on each.
    """

    def __init__(self, *, num_nodes: int, cpus_per_node: int) -> None:
        os.environ.update(_environment())
        from ray.cluster_utils import Cluster

        self._cpus = cpus_per_node
        self._cluster = Cluster(
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
        self._nodes: dict[str, Any] = {}
        for _ in range(num_nodes):
            self.add_node()

    @property
    def address(self) -> str:
        """Return what ``ray.init(address=...)`` takes."""
        return str(self._cluster.address)

    def nodes(self) -> list[str]:
        """Return the Ray ids of the simulated nodes, oldest first."""
        return list(self._nodes)

    def add_node(self) -> str:
        """Start one more node and return its Ray id. Blocks for one to two seconds."""
        node = self._cluster.add_node(
            wait=False, num_cpus=self._cpus, object_store_memory=OBJECT_STORE_BYTES
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill_node(self, node: str) -> None:
        """SIGKILL the raylet of ``node``: its workers end with it, nothing says goodbye."""
        processes = self._nodes.pop(node).all_processes
        for info in (entry for entries in processes.values() for entry in entries):
            info.process.kill()
        for info in (entry for entries in processes.values() for entry in entries):
            # Unreaped, a dead raylet counts as alive and its workers train on.
            info.process.wait()

    def shutdown(self) -> None:
        """Stop every process of the cluster."""
        self._cluster.shutdown()


class HostedCluster:
    """A local cluster in a process of its own, spoken to over a unix socket.

    It ends with this process, however that ends, until ``stop_when`` is called.

    Args:
        num_nodes: Nodes beside the head.
        cpus_per_node: Workers that fit on each.
    """

    def __init__(self, *, num_nodes: int, cpus_per_node: int) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        for number in range(1, STARTS_MAX + 1):
            self._start(num_nodes, cpus_per_node)
            try:
                address = self._wait_ready(deadline_s)
            except BaseException:
                self._kill()
                raise
            if address:
                self.address = address
                return
            self._kill()
            if number == STARTS_MAX or time.monotonic() >= deadline_s:
                log = (Path(self._directory) / "log").read_text(errors="replace")[-2000:]
                message = f"the local Ray cluster did not start, tried {number} times:\n{log}"
                raise RuntimeError(message)

    def nodes(self) -> list[str]:
        """Return the Ray ids of the simulated nodes, oldest first."""
        return list(self._ask("nodes"))

    def add_node(self) -> str:
        """Start one more node and return its Ray id."""
        return str(self._ask("add_node"))

    def kill_node(self, node: str) -> None:
        """Kill ``node`` as a power cut would."""
        self._ask("kill_node", node)

    def stop_when(self, url: str) -> None:
        """Let the cluster live on without this process, and end once ``url`` is written."""
        self._ask("stop_when", url)

    def shutdown(self) -> None:
        """Leave the cluster, stop it and its host."""
        # A process that stays connected is ended by Ray a minute after its cluster.
        ray.shutdown()
        with contextlib.suppress(OSError):
            self._ask("shutdown")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        # Also if the host has ended: one whose shutdown failed left Ray's daemons behind.
        self._kill()

    def _start(self, num_nodes: int, cpus_per_node: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="everstep-cluster-")
        self._socket_path = str(Path(self._directory) / "control")
        command = [sys.executable, "-m", "orchestrator.shell.local.cluster"]
        command += [self._socket_path, str(num_nodes), str(cpus_per_node), str(os.getpid())]
        with (Path(self._directory) / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **_environment()},
            )

    def _kill(self) -> None:
        # Half a cluster takes no command; Ray's daemons are in the host's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_ready(self, deadline_s: float) -> str:
        """Return the cluster's address once it is there, "" if it ended or took too long."""
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                return str(self._ask("address"))
            time.sleep(0.1)
        return ""

    def _ask(self, command: str, argument: str = "") -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket_path)
            connection.sendall(json.dumps([command, argument]).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline() or b'["error", "the cluster host went away"]')
        if answer[0] == "error":
            raise RuntimeError(answer[1])
        return answer[1]


def serve(socket_path: str, num_nodes: int, cpus_per_node: int) -> None:
    """Host a cluster until it is told to shut down."""
    cluster = LocalCluster(num_nodes=num_nodes, cpus_per_node=cpus_per_node)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(socket_path)
            listener.listen()
            command = ""
            while command != "shutdown":
                connection, _ = listener.accept()
                with connection, connection.makefile("rwb") as stream:
                    command, argument = json.loads(stream.readline())
                    stream.write(json.dumps(_perform(cluster, command, argument)).encode() + b"\n")
    finally:
        cluster.shutdown()
        shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


def _perform(cluster: LocalCluster, command: str, argument: str) -> list[Any]:
    try:
        match command:
            case "address":
                return ["ok", cluster.address]
            case "nodes":
                return ["ok", cluster.nodes()]
            case "add_node":
                return ["ok", cluster.add_node()]
            case "kill_node":
                cluster.kill_node(argument)
                return ["ok", None]
            case "stop_when":
                _lives_on.set()
                what = (argument, _written(argument))
                threading.Thread(target=_stop_when, args=what, daemon=True).start()
                return ["ok", None]
            case "shutdown":
                return ["ok", None]
            case _:
                return ["error", f"unknown command {command!r}"]
    except Exception as error:  # noqa: BLE001  the edge: it becomes the asker's error
        return ["error", repr(error)]


def _stop_when(url: str, before: bytes | None) -> None:
    """End this process, and with it the cluster, once ``url`` is there and not as before."""
    while _written(url) in (None, before):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _written(url: str) -> bytes | None:
    """Return what a file has in it; None if there is none, or none that can be read now."""
    try:
        store, path = open_store(url)
        return store.read(path) if store.exists(path) else None
    except StorageError:
        return None


def _end_with(starter: int) -> None:
    """End this process when its starter is gone that nobody has told to live without."""
    while not _lives_on.wait(0.5):
        if os.getppid() != starter:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _raise_exit(_signal: int, _frame: Any) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _raise_exit)
    threading.Thread(target=_end_with, args=(int(sys.argv[4]),), daemon=True).start()
    try:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except Exception:
        # Here, because nothing is said after the end of our group.
        traceback.print_exc()
        raise
    finally:
        if os.getpgrp() == os.getpid():
            # Nobody may be left to do it: daemons that Ray did not stop are in our group.
            os.killpg(0, signal.SIGKILL)
