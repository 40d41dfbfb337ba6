"""Ask every node of a cluster about itself, for ``everstep doctor``.

A short-lived process on each node collects the facts. No file stays in the run directory.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.config import RunConfig, run_preflight
from orchestrator.driver.cluster import HEAD, join_cluster, on_head
from orchestrator.driver.doctor.findings import (
    Finding,
    Level,
    NodeFacts,
    NodeKind,
    diagnose,
    interface_problem,
    port_taken,
    unserved,
)
from orchestrator.errors import CapacityError
from orchestrator.shell import own_folder, require_loopback, wall_time
from ucp_core.errors import UcpError
from ucp_core.storage import join, open_store
from workers.keeper import FAILURES, no_answer, sources_of
from workers.process import copies_past_caches

T = TypeVar("T")

#: Packages whose versions must be equal on all machines, like Python's major and minor version.
_PACKAGES = ("everstep", "ray", "torch")
#: A node that starts no process within this time would not start a worker in time either.
ANSWER_S_MAX = 60.0
_CONNECT_S_MAX = 3.0


def examine(
    config: RunConfig | None, *, address: str | None
) -> tuple[list[Finding], list[NodeFacts]]:
    """Return the findings, and the facts about each machine.

    Args:
        config: The run's configuration, which is checked too; None for no run.
        address: Address of a Ray cluster. Without it, ``config`` or ``RAY_ADDRESS`` names one;
            without those, only this machine is checked.

    Raises:
        CapacityError: No cluster answers there.
    """
    if address is None and config is not None:
        address = config.cluster.address
    address = address or os.environ.get("RAY_ADDRESS")
    watched = _watched(config, address)
    here = facts_of("this machine", watched)
    if config is not None:
        # Simulated nodes have enough for all workers.
        num, needed = config.workers.max, config.worker_resources()
        here = replace(here, resources={name: amount * num for name, amount in needed.items()})
    nodes: list[NodeFacts] = [here]
    silent: list[str] = []
    findings = _settings(config) if config is not None else []
    port = config.cluster.metrics_port if config is not None else 0
    why_no_port: str | None = ""
    if address is not None:
        join_cluster(address, advice=". Start one with `ray start --head`")
        try:
            nodes, silent = _ask_nodes(config.run.directory if config is not None else "", watched)
            if config is not None:
                types = _on_head(_types_here)
                findings += unserved(config, there=_nodes_there(), types=types)
            if port:
                why_no_port = _on_head(_why_no_port, port)
        finally:
            ray.shutdown()
    else:
        findings.append(_simulated())
        why_no_port = _why_no_port(port) if port else ""
    if why_no_port:
        findings.append(port_taken(port, why_no_port))
    if silent:
        message = f"no answer within {ANSWER_S_MAX:g} s from {', '.join(silent)}"
        advice = "see Ray's logs on these nodes, and whether everstep is installed there"
        findings.append(Finding(Level.FAIL, "processes", message, advice))
    return [*findings, *diagnose(nodes, here=here, config=config)], nodes


def _settings(config: RunConfig) -> list[Finding]:
    problems = run_preflight(config)
    found = [Finding(Level.FAIL, problem.path, problem.message) for problem in problems]
    return found or [
        Finding(Level.OK, "settings", "run directory, data, files and memory are fine")
    ]


def _simulated() -> Finding:
    """Return whether simulated nodes can start on this machine."""
    try:
        require_loopback()
        return Finding(Level.OK, "simulated nodes", f"their files would be in {own_folder()}")
    except CapacityError as error:
        return Finding(Level.FAIL, "simulated nodes", str(error))


def _watched(config: RunConfig | None, address: str | None) -> dict[str, str]:
    """Return the sources that would announce the end of a node."""
    if config is None:
        return {"cloud": "auto" if address else "none"}
    cluster = config.cluster.model_copy(update={"address": address})
    return config.model_copy(update={"cluster": cluster}).watched()


def facts_of(node: str, watched: Mapping[str, str]) -> NodeFacts:
    """Return the facts about this machine, called ``node``, as if its clock were right.

    ``watched`` are arguments of ``workers.keeper.sources_of``.
    """
    unheard = []
    sources = sources_of(**watched)
    for source in sources:
        try:
            source.look()
        except FAILURES as error:
            unheard.append(no_answer(source, error))
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "is missing"
    return NodeFacts(
        node=node,
        versions=versions,
        clock_ahead_s=0.0,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free,  # noqa: S108 - no file is made
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resources={},
        copies_past_caches=copies_past_caches(os.environ),
        watched=tuple(source.name for source in sources),
        unheard=tuple(unheard),
        interface_problem=interface_problem(
            os.environ, [name for _, name in socket.if_nameindex()]
        ),
    )


class Examiner:
    """A process on one node, for ``_ask_nodes``."""

    def __init__(self, node: str, watched: dict[str, str]) -> None:
        self._node, self._watched = node, watched
        self._host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, 0), family=family)

    def address(self) -> tuple[str, int]:
        """Return the address at which other nodes reach this process."""
        return self._host, self._socket.getsockname()[1]

    def facts(self) -> tuple[NodeFacts, float]:
        """Return the facts about the machine, and its clock."""
        return facts_of(self._node, self._watched), wall_time()

    def unreachable(self, others: dict[str, tuple[str, int]]) -> tuple[str, ...]:
        """Return those of ``others`` that accept no connection."""
        return tuple(name for name, place in others.items() if not _reaches(place))

    def storage_problem(self, run_url: str, probe: str, answer: str) -> str:
        """Read the driver's file and write an answer; return why that failed, or ""."""
        try:
            store, path = open_store(run_url)
            if not store.exists(join(path, probe)):
                return f"does not see a file that this machine wrote to {run_url}"
            store.write_atomic(join(path, answer), b"everstep", fsync=False)
        except (UcpError, OSError) as error:
            return str(error)
        return ""


def _reaches(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=_CONNECT_S_MAX).close()
    except OSError:
        return False
    return True


def _ask_nodes(run_url: str, watched: dict[str, str]) -> tuple[list[NodeFacts], list[str]]:
    """Return the facts of the head and of all nodes that may hold workers, and the silent nodes."""
    available = available_resources_per_node()
    rows = [
        row
        for row in ray.nodes()
        if row["Alive"] and (row["Resources"].get("CPU", 0) or HEAD in row["Resources"])
    ]
    holders = {row["NodeID"] for row in rows if row["Resources"].get("CPU", 0)}
    names = {row["NodeID"]: f"{row['NodeManagerHostname']} ({row['NodeID'][:8]})" for row in rows}
    examiners: dict[str, Any] = {
        node: ray.remote(Examiner)
        .options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        )
        .remote(name, watched)
        for node, name in names.items()
    }
    places = _answers({node: each.address.remote() for node, each in examiners.items()})
    asked_s = wall_time()
    told = _answers({node: examiners[node].facts.remote() for node in places})
    # Each clock was read at an unknown time between the request and now.
    slack_s = (wall_time() - asked_s) / 2
    others = {names[node]: place for node, place in places.items()}
    cut_off = _answers({node: examiners[node].unreachable.remote(others) for node in told})
    storage = _storage_problems({node: examiners[node] for node in told}, run_url)
    nodes = [
        replace(
            facts,
            clock_ahead_s=min(clock_s - asked_s, 0.0) or max(clock_s - asked_s - 2 * slack_s, 0.0),
            resources=_amounts(available.get(node, {})),
            holds_workers=node in holders,
            unreachable=cut_off.get(node, ()),
            storage_problem=storage.get(node, ""),
        )
        for node, (facts, clock_s) in told.items()
    ]
    return nodes, [name for node, name in names.items() if node not in told]


def _nodes_there() -> list[NodeKind]:
    return [
        NodeKind(
            name=row["NodeManagerHostname"],
            resources=_amounts(row["Resources"]),
            labels=dict(row["Labels"]),
        )
        for row in ray.nodes()
        if row["Alive"]
    ]


def _on_head(ask: Callable[..., T], *arguments: Any) -> T | None:
    """Run a function where the controller will run; return its result, None without a cluster."""
    answer: T | None = _answers({"head": on_head(ask, *arguments)}).get("head")
    return answer


def _why_no_port(port: int) -> str:
    """Return why nothing can listen on a port of this machine; "" if something can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def _types_here() -> list[NodeKind] | None:
    """Return the types of node that the autoscaler on this machine may add; None without one."""
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader

    option = b"--autoscaling-config="
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # It has just ended.
        told = [word.removeprefix(option).decode() for word in words if word.startswith(option)]
        if told and told[0] and any(word.endswith(b"monitor.py") for word in words):
            config = FileConfigReader(told[0]).get_cached_autoscaling_config()
            return [
                NodeKind(name=kind.name, resources=dict(kind.resources), labels=dict(kind.labels))
                for kind in config.get_node_type_configs().values()
                if kind.max_worker_nodes
            ]
    return None


def _storage_problems(examiners: dict[str, Any], run_url: str) -> dict[str, str]:
    if not run_url:
        return {}
    store, path = open_store(run_url)
    probe = f"doctor-{uuid.uuid4().hex[:8]}"
    answers = {node: f"{probe}-{node[:16]}" for node in examiners}
    try:
        store.write_atomic(join(path, probe), b"everstep", fsync=False)
        problems = _answers(
            {
                node: each.storage_problem.remote(run_url, probe, answers[node])
                for node, each in examiners.items()
            }
        )
        for node, why in problems.items():
            if not why and not store.exists(join(path, answers[node])):
                problems[node] = f"this machine does not see a file that it wrote to {run_url}"
    except (UcpError, OSError) as error:
        return dict.fromkeys(examiners, f"{run_url} cannot be written from here: {error}")
    finally:
        for name in (probe, *answers.values()):
            if store.exists(join(path, name)):
                store.delete(join(path, name))
    return problems


def _answers(calls: dict[str, Any]) -> dict[str, Any]:
    """Return the answers that came in time, by node."""
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S_MAX)
    found: dict[str, Any] = {}
    for node, call in calls.items():
        if call in ready:
            try:
                found[node] = ray.get(call, timeout=ANSWER_S_MAX)
            except (RayError, GetTimeoutError):
                continue
    return found


def _amounts(resources: dict[str, Any]) -> dict[str, float]:
    return {name: float(amount) for name, amount in resources.items() if ":" not in name}
