"""Judge a cluster before a run spends money on it: facts about nodes become findings. Pure.

Each check finds something that would fail a run, or slow its recoveries, hours later and with a
less clear message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from orchestrator.config import Alternative, RunConfig
from workers.process import TUNABLE, VARIABLE

#: A worker's progress records and record rings take less than a MiB. If less than this is free,
#: something else fills the memory.
SHARED_MEMORY_BYTES_MIN = 64 << 20
#: Ray alone holds some hundred connections on a node; Ray advises 65536.
OPEN_FILES_MIN = 4096
#: Incidents compare times of several machines.
CLOCK_S_MAX = 1.0


class Level(StrEnum):
    """The severity of a finding: the run works, works badly, or does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    about: str  #: The subject of the check, in one or two words.
    message: str  #: The result; names the nodes.
    advice: str = ""  #: How to fix it; "" if there is nothing to do.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about one machine."""

    node: str  #: Its host name and the first characters of Ray's id; "this machine" without Ray.
    #: Versions by package, of Python and of everything that must be equal on all machines.
    versions: dict[str, str]
    clock_ahead_s: float  #: How far its clock is ahead of ours.
    shared_memory_bytes: int  #: Free in /dev/shm.
    open_files: int  #: Limit of open files per process.
    resources: dict[str, float]  #: Ray's free resources there, by Ray's names.
    #: Whether it may hold workers; a head without processors holds only the controller.
    holds_workers: bool = True
    #: Whether large copies in Ray's processes bypass the processor's caches.
    copies_past_caches: bool = True
    #: Why it cannot use the run directory; "" if it can, or none was named.
    storage_problem: str = ""
    unreachable: tuple[str, ...] = ()  #: Nodes that accepted no connection from it.
    watched: tuple[str, ...] = ()  #: Sources, besides Ray, that would announce its end.
    unheard: tuple[str, ...] = ()  #: A line for each of these sources that does not answer.
    #: Why collectives find no network interface there; "" if they find one.
    interface_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """An existing node, or a type of node that an autoscaler may add."""

    name: str  #: For people.
    #: Total resources, by Ray's names; empty if the autoscaler knows them only once a node runs.
    resources: dict[str, float]
    labels: dict[str, str]  #: Ray's labels.

    def serves(self, wanted: Alternative) -> bool:
        """Return whether a worker of that alternative can run there."""
        fits = all(
            self.resources.get(name, 0.0) >= amount for name, amount in wanted.resources.items()
        )
        has = all(self.labels.get(label) == value for label, value in wanted.selector().items())
        return has and (fits or not self.resources)

    def __str__(self) -> str:
        facts = {**{name: f"{amount:g}" for name, amount in self.resources.items()}, **self.labels}
        return f"{self.name} ({', '.join(f'{name} {value}' for name, value in facts.items())})"


def unserved(
    config: RunConfig, *, there: Sequence[NodeKind], types: Sequence[NodeKind] | None
) -> list[Finding]:
    """Return a finding for each alternative of capacity that no node can serve.

    Without alternatives, the room for a worker counts as one. ``there`` are the nodes of the
    cluster, and ``types`` those that its autoscaler may add; None if unknown.
    """
    findings: list[Finding] = []
    for number, wanted in enumerate(config.alternatives()):
        if any(kind.serves(wanted) for kind in (*there, *(types or ()))):
            continue
        about, change = f"capacity.{number}", f"capacity.{number}"
        if not config.capacity:
            about, change = "cluster", "cluster.cpus_per_worker or cluster.gpus_per_worker"
        needs = {**{n: f"{a:g}" for n, a in wanted.resources.items()}, **wanted.selector()}
        what = ", ".join(f"{name} {value}" for name, value in needs.items())
        if types is None:
            message = f"no node has {what}; it is not known which nodes an autoscaler may add"
            advice = "check that it has a type of node for it"
        else:
            message = f"no node has {what}, and no type of node that the autoscaler may add"
            advice = (
                f"change {change}, or add such a type; it has "
                f"{'; '.join(map(str, types)) or 'none'}"
            )
        level = Level.WARN if types is None else Level.FAIL
        findings.append(Finding(level, about, message, advice))
    return findings


def port_taken(port: int, why: str) -> Finding:
    """Return the finding that nothing can listen on the port for metrics, and why."""
    message = (
        f"port {port} of the controller's machine: {why}; the run would take a free one, so "
        "Prometheus would look at the wrong port"
    )
    advice = (
        f"name another port; `ss -ltnp sport = :{port}` there shows the process that uses this one"
    )
    return Finding(Level.WARN, "cluster.metrics_port", message, advice)


def diagnose(
    nodes: Sequence[NodeFacts], *, here: NodeFacts, config: RunConfig | None
) -> list[Finding]:
    """Return the result of every check of ``nodes``.

    Args:
        nodes: The head and the nodes for workers that answered; without a cluster only ``here``.
        here: The machine of this process; the nodes must have its versions.
        config: The run's configuration; with None, only check what every run needs.
    """
    findings = [_finding(check, nodes, here) for check in _OF_EACH]
    if list(nodes) != [here]:
        between = [_finding(check, nodes, here) for check in _BETWEEN]
        if not any(facts.holds_workers for facts in nodes):
            # A single node reads its own file and connects to itself.
            between = [finding for finding in between if finding.level is not Level.OK]
            between.append(_NO_NODES)
        findings += between
    if config is not None:
        findings += [*_sharing(config), *_capacity(nodes, config)]
    return findings


def _finding(check: _NodeCheck, nodes: Sequence[NodeFacts], here: NodeFacts) -> Finding:
    """Return one finding that names each node with a problem, and the problem."""
    found = [f"{facts.node}: {why}" for facts in nodes if (why := check.problem(facts, here))]
    if found:
        return Finding(check.level, check.about, "; ".join(found), check.advice)
    good = check.good if isinstance(check.good, str) else check.good(nodes, here)
    return Finding(Level.OK, check.about, good)


def _differing(facts: NodeFacts, here: NodeFacts) -> str:
    return ", ".join(
        f"{name} {facts.versions.get(name, 'is missing')} (here {version})"
        for name, version in here.versions.items()
        if facts.versions.get(name) != version
    )


def _versions(_: Sequence[NodeFacts], here: NodeFacts) -> str:
    return ", ".join(f"{name} {version}" for name, version in here.versions.items())


def _watched(nodes: Sequence[NodeFacts], _: NodeFacts) -> str:
    """Return the message about sources of notices."""
    if watched := sorted({name for facts in nodes for name in facts.watched}):
        return f"{' and '.join(watched)}: answers"
    return (
        "nodes ask no cloud (none is recognised, notices.cloud is none, or nodes are simulated); "
        "the run follows only Ray's own drains (SIGTERM of a pod, `ray drain-node`)"
    )


class _NodeCheck(NamedTuple):
    about: str
    #: Returns the problem of a node, "" if it has none; also takes the machine that asks.
    problem: Callable[[NodeFacts, NodeFacts], str]
    #: The message if no node has a problem.
    good: str | Callable[[Sequence[NodeFacts], NodeFacts], str]
    advice: str
    level: Level = Level.WARN


_OF_EACH = (
    _NodeCheck(
        "versions",
        _differing,
        _versions,
        "install the same version on every node: use one image, or a runtime environment of Ray",
        Level.FAIL,
    ),
    _NodeCheck(
        "shared memory",
        lambda f, _: (
            f"{f.shared_memory_bytes >> 20} MiB are free in /dev/shm"
            if f.shared_memory_bytes < SHARED_MEMORY_BYTES_MIN
            else ""
        ),
        f"at least {SHARED_MEMORY_BYTES_MIN >> 20} MiB are free in /dev/shm",
        "start containers with a larger --shm-size",
    ),
    _NodeCheck(
        "open files",
        lambda f, _: f"{f.open_files} a process" if f.open_files < OPEN_FILES_MIN else "",
        f"at least {OPEN_FILES_MIN} a process are allowed",
        "start Ray under `ulimit -n 65536`",
    ),
    _NodeCheck(
        "interfaces",
        lambda f, _: f.interface_problem,
        "collectives find one",
        "fix the variable where Ray is started, or leave it out",
        Level.FAIL,
    ),
    _NodeCheck(
        "notices",
        lambda f, _: ", ".join(f.unheard),
        _watched,
        "do as the brackets say; otherwise the run notices that a node is taken only when it "
        "is gone",
    ),
)
#: Checks that compare or connect nodes.
_BETWEEN = (
    _NodeCheck(
        "storage",
        lambda f, _: f.storage_problem,
        "every node reads what another wrote to the run directory",
        "set run.directory to storage that all nodes share, such as s3:// or NFS",
        Level.FAIL,
    ),
    _NodeCheck(
        "network",
        lambda f, _: f"cannot connect to {', '.join(f.unreachable)}" if f.unreachable else "",
        lambda nodes, _: f"each of {len(nodes)} nodes can connect to every other",
        "open all TCP ports between the nodes: collectives and copies need them",
        Level.FAIL,
    ),
    _NodeCheck(
        "clocks",
        lambda f, _: f"{f.clock_ahead_s:+.1f} s" if abs(f.clock_ahead_s) > CLOCK_S_MAX else "",
        f"all agree within {CLOCK_S_MAX:g} s",
        "synchronise them by NTP: incidents compare times of several machines",
    ),
    _NodeCheck(
        "copies",
        lambda f, _: "" if f.copies_past_caches else "large copies go through the caches",
        "large copies bypass the processor's caches",
        f"start Ray with {VARIABLE}={TUNABLE}: snapshots then delay training less",
    ),
)
_NO_NODES = Finding(
    Level.WARN,
    "nodes",
    "no node that could hold workers answers: storage and network between nodes were not checked",
    "add a node, or start the run so that an autoscaler adds one, and check again",
)


def interface_problem(environment: Mapping[str, str], interfaces: Sequence[str]) -> str:
    """Return why Gloo or NCCL finds no interface on a machine; "" if both find one.

    Gloo takes whole names. NCCL takes prefixes, or whole names after "=", or all names except those
    after "^".
    """
    found = []
    gloo = environment.get("GLOO_SOCKET_IFNAME", "")
    unknown = [name for name in gloo.split(",") if name and name not in interfaces]
    if unknown:
        is_plain = unknown[0][0] not in "^="
        why = "which is not an interface" if is_plain else "and Gloo takes whole names"
        found.append(f"GLOO_SOCKET_IFNAME={gloo} has {unknown[0]}, {why}")
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    is_exact = nccl.lstrip("^").startswith("=")
    words = [word for word in nccl.lstrip("^=").split(",") if word]
    fit = [
        name
        for name in interfaces
        if any(name == word if is_exact else name.startswith(word) for word in words)
    ]
    if words and (not set(interfaces) - set(fit) if nccl.startswith("^") else not fit):
        found.append(f"NCCL_SOCKET_IFNAME={nccl} leaves no interface")
    return "; ".join([*found, f"there are {', '.join(interfaces)}"]) if found else ""


def _sharing(config: RunConfig) -> list[Finding]:
    """Return a finding about workers that share a GPU, and what that costs."""
    share = config.cluster.gpus_per_worker
    if not 0 < share < 1:
        return []
    message = (
        f"up to {int(1 / share)} workers share a GPU: each has {share:.0%} of its memory, and "
        "they take turns, so a step takes as long as all of theirs together, and a collective "
        "some milliseconds more"
    )
    return [Finding(Level.OK, "sharing", message)]


def _capacity(nodes: Sequence[NodeFacts], config: RunConfig) -> list[Finding]:
    """Return how many workers fit now, counted node by node as Ray places them."""
    needed = config.worker_resources()
    room = sum(
        min(int(facts.resources.get(name, 0.0) / amount) for name, amount in needed.items())
        for facts in nodes
        if facts.resources
    )
    of_one = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    if room >= config.workers.max:
        return [Finding(Level.OK, "capacity", f"all of workers.max={config.workers.max} fit now")]
    message = f"{room} of workers.max={config.workers.max} fit now, each with {of_one}"
    if room >= config.workers.min:
        advice = "the run starts with these and grows when nodes join"
    else:
        advice = f"the run waits for workers.min={config.workers.min}: add nodes, or an autoscaler"
    return [Finding(Level.WARN, "capacity", message, advice)]


def report(findings: Sequence[Finding], nodes: Sequence[NodeFacts]) -> dict[str, Any]:
    """Return what ``everstep doctor --json`` prints."""
    return {
        "ok": all(finding.level is not Level.FAIL for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "nodes": [asdict(facts) for facts in nodes],
    }


def advice_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, followed by one with its advice."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5} {finding.about}: {finding.message}")
        if finding.advice:
            lines.append(f"      -> {finding.advice}")
    return lines
