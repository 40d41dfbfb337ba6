"""A Ray cluster whose own autoscaler (v2) buys and returns nodes, all on this machine.

The head is an ordinary ``ray start --head``; its autoscaler calls ``NodeProvider`` below, as it
would call that of a cloud. A test can take nodes away without a word, and have a type sold out.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from orchestrator.shell.local.cluster import HEAD_ENVIRONMENT, SYSTEM_CONFIG
from tests.support.network_cluster import HEAD

#: Resources and labels of a type of node.
NodeType = Mapping[str, Any]

_HEAD_ID = "f" * 51 + "00000"
_HEAD_TYPE = "ray.head.default"  # FakeMultiNodeProvider names it so
_BIN = Path(sys.executable).parent
#: The signal ends Ray with the process that started it, also if that one is killed.
_TIED = ("setpriv", "--pdeathsig", "TERM")
_SOLD_OUT = "sold_out"
_LOOK_S = 0.1
_START_S_MAX = 120.0
_OBJECT_STORE_BYTES = 80_000_000
#: An idle node is given back after this; clouds bill by the second, people wait minutes.
IDLE_S = 6.0


class NodeProvider(FakeMultiNodeProvider):
    """Starts raylets on this machine, notes them in a folder, and sells nothing that is sold out.

    It runs in Ray's autoscaler process.
    """

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        """Start ``count`` nodes of a type, or refuse as a cloud does."""
        kind = tags["ray-user-node-type"]
        folder = Path(self.provider_config["folder"])
        with contextlib.suppress(FileNotFoundError):
            if kind in (folder / _SOLD_OUT).read_text().split():
                raise RuntimeError(f"InsufficientInstanceCapacity: no {kind} left")
        known = set(self._nodes)
        super().create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
        for node_id in self._nodes.keys() - known:
            started = self._started(node_id).all_processes.values()
            pids = [info.process.pid for infos in started for info in infos]
            note = folder / f".{node_id}"
            note.write_text(json.dumps({"type": kind, "pids": pids}))
            note.rename(folder / f"{node_id}.node")

    def _next_hex_node_id(self) -> str:
        """Return an id as Ray makes them: what we keep of a node is named by its beginning."""
        return secrets.token_hex(len(_HEAD_ID) // 2)

    def _started(self, node_id: str) -> Any:
        return self._nodes[node_id]["node"]

    def terminate_node(self, node_id: str) -> None:
        """End a node, which may be dead already."""
        super().terminate_node(node_id)
        (Path(self.provider_config["folder"]) / f"{node_id}.node").unlink(missing_ok=True)


class AutoscaledCluster:
    """A head without workers, and nodes as they are asked for."""

    def __init__(self, types: Mapping[str, NodeType]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-auto-"))
        self._nodes = self._folder / "nodes"
        self._nodes.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers: dict[str, int] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        settings = self._folder / "autoscaler.json"
        settings.write_text(json.dumps(self._autoscaler(types)))
        command = [
            str(_BIN / "ray"), "start", "--block", "--head", f"--port={port}", "--num-cpus=0",
            "--node-ip-address=127.0.0.1", f"--autoscaling-config={settings}", "--num-gpus=0",
            f"--temp-dir={self._folder}", f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--include-dashboard=False", "--disable-usage-stats",
            f"--system-config={json.dumps(SYSTEM_CONFIG)}",
        ]  # fmt: skip
        log = self._folder / "head.log"
        try:
            self._spawn(command, log, _TIED if shutil.which(_TIED[0]) else ())
            self.wait("Ray runs", lambda: "Ray runtime started" in log.read_text(errors="replace"))
        except BaseException:
            self.close()
            raise

    def _autoscaler(self, types: Mapping[str, NodeType]) -> dict[str, Any]:
        kinds = {
            name: {
                "node_config": {},
                "min_workers": 0,
                **kind,
                "resources": {"object_store_memory": _OBJECT_STORE_BYTES, **kind["resources"]},
            }
            for name, kind in types.items()
        }
        kinds[_HEAD_TYPE] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        lists = (
            "initialization_commands", "setup_commands", "head_setup_commands",
            "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
            "cluster_synced_files", "rsync_exclude", "rsync_filter",
        )  # fmt: skip
        return {
            "cluster_name": "everstep",
            "max_workers": sum(kind["max_workers"] for kind in kinds.values()),
            "provider": {
                "type": "external",
                "module": f"{__name__}.{NodeProvider.__name__}",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "gcs_address": self.address,
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
                "folder": str(self._nodes),
            },
            "available_node_types": kinds,
            "head_node_type": _HEAD_TYPE,
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_S / 60.0,
            **{name: [] for name in lists},
        }

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of it."""
        self.close()

    def close(self) -> None:
        """End every process of the cluster; delete its folder."""
        own = os.getpid()
        while pids := [pid for pid in self._pids() if pid != own]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()
            time.sleep(_LOOK_S)
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pids(self) -> list[int]:
        """Return the processes that name the folder in their command or environment."""
        mark = str(self._folder).encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                if mark in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(pid)
        return found

    def _spawn(
        self, command: Sequence[str], log: Path, tied: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **HEAD_ENVIRONMENT,
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self._folder),
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*tied, *command], stdout=output, stderr=output, env=environment,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def host(self, machine: int) -> str:
        """Return the IP address of the head; nodes have it too."""
        assert machine == HEAD
        return self.address.partition(":")[0]

    def start(self, machine: int, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command of everstep's, or of Python's, beside the head."""
        assert machine == HEAD
        return self._spawn([str(_BIN / words[0]), *words[1:]], log)

    def run(self, machine: int, words: Sequence[str], timeout_s: float) -> None:
        """Run such a command to its end."""
        assert not self.start(machine, words, self._folder / "command.log").wait(timeout_s)

    def bought(self) -> dict[str, str]:
        """Return the type of each node that was bought and not given back, by the provider's id."""
        return {node: note["type"] for node, note in self._notes().items()}

    def _notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {}
        for path in sorted(self._nodes.glob("*.node")):
            with contextlib.suppress(FileNotFoundError):
                notes[path.stem] = json.loads(path.read_text())
        return notes

    def nodes(self) -> dict[str, int]:
        """Return a number for each node that there is or was, by Ray's id of the node."""
        for node in self.bought():
            self._numbers.setdefault(node, len(self._numbers) + 1)
        return dict(self._numbers)

    def sell_out(self, *types: str) -> None:
        """Have the provider refuse these types of node from now on, and no others."""
        (self._nodes / _SOLD_OUT).write_text(" ".join(types))

    def take(self, node: str) -> None:
        """Kill all processes of a node, as a provider does that takes it back without a word."""
        for pid in self._notes()[node]["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, what: str, found: Callable[[], bool], timeout_s: float = _START_S_MAX) -> float:
        """Return after how many seconds ``found`` returned true."""
        began_s = time.monotonic()
        while not found():
            if time.monotonic() - began_s > timeout_s:
                raise TimeoutError(f"not seen: {what}; bought: {self.bought()}")
            time.sleep(_LOOK_S)
        return time.monotonic() - began_s
