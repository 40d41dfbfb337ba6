"""What is wrong with a cluster before money is spent on it: facts about nodes in, findings out.

Everything here is looked at because a run would fail of it, or heal badly, hours later and with a
less telling message. Pure; ``orchestrator.driver.doctor`` collects the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from orchestrator.config import RunConfig
from workers.process import TUNABLE, VARIABLE

__all__ = ["Finding", "Level", "NodeFacts", "diagnose"]

#: Pages and rings of a worker take less than a MiB; below this something else fills it up.
SHARED_MEMORY_BYTES_MIN = 64 << 20
#: Ray alone holds some hundred connections on a node; its own advice is 65536.
OPEN_FILES_MIN = 4096
#: Incidents tell times of several machines beside each other.
CLOCK_S_MAX = 1.0


class Level(StrEnum):
    """How bad a finding is: a run would work, would work badly, or would not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: Of the finding.
        about: What was looked at, in one or two words.
        message: What was found; names the nodes.
        advice: What to do; "" if nothing is to be done.
    """

    level: Level
    about: str
    message: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the finding as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one machine says of itself.

    Attributes:
        node: Its host name and the beginning of Ray's id; "this machine" where there is no Ray.
        versions: Of Python and of the packages that the machines must agree on, by name.
        clock_ahead_s: How far its clock is ahead of ours.
        shared_memory_bytes: Free in /dev/shm.
        open_files: How many one process may have.
        resources: What Ray has to give there now, by its names.
        copies_past_caches: Whether large copies of Ray's processes there go past the caches.
        storage_problem: Why it cannot use the run directory; "" if it can, or none was named.
        unreachable: Nodes to which it could open no connection.
    """

    node: str
    versions: dict[str, str]
    clock_ahead_s: float
    shared_memory_bytes: int
    open_files: int
    resources: dict[str, float]
    copies_past_caches: bool = True
    storage_problem: str = ""
    unreachable: tuple[str, ...] = ()


def diagnose(
    nodes: Sequence[NodeFacts], *, here: NodeFacts, config: RunConfig | None
) -> list[Finding]:
    """Return what is right and wrong with ``nodes`` for a run.

    Args:
        nodes: Those of the cluster that answered; only ``here`` where there is no cluster.
        here: The machine that asks: what its packages are, the others' have to be.
        config: Of the run; None looks at what every run needs.
    """
    findings = [
        _versions(nodes, here),
        _each(
            nodes,
            "shared memory",
            _little_shared_memory,
            good=f"at least {SHARED_MEMORY_BYTES_MIN >> 20} MiB are free in /dev/shm",
            advice="start containers with a larger --shm-size",
        ),
        _each(
            nodes,
            "open files",
            lambda f: f"{f.open_files} a process" if f.open_files < OPEN_FILES_MIN else "",
            good=f"at least {OPEN_FILES_MIN} a process are allowed",
            advice="start Ray under `ulimit -n 65536`",
        ),
    ]
    if list(nodes) != [here]:
        findings += _between(nodes)
    if config is not None:
        findings += _capacity(nodes, config)
    return findings


def _between(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return what is right and wrong between the nodes of a cluster."""
    return [
        _each(
            nodes,
            "storage",
            lambda facts: facts.storage_problem,
            level=Level.FAIL,
            good="what one node writes to the run directory, the others read",
            advice="name a run.directory on storage that all nodes share, as s3:// or NFS",
        ),
        _each(
            nodes,
            "network",
            lambda facts: f"none to {', '.join(facts.unreachable)}" if facts.unreachable else "",
            level=Level.FAIL,
            good=f"each of {len(nodes)} nodes opens connections to every other",
            advice="open all TCP ports between the nodes: collectives and copies need them",
        ),
        _each(
            nodes,
            "clocks",
            lambda f: f"{f.clock_ahead_s:+.1f} s" if abs(f.clock_ahead_s) > CLOCK_S_MAX else "",
            good=f"they agree within {CLOCK_S_MAX:g} s",
            advice="let NTP set them: times of incidents compare machines",
        ),
        _each(
            nodes,
            "copies",
            lambda facts: "" if facts.copies_past_caches else "blocks go through the caches",
            good="large ones go past the caches",
            advice=f"start Ray with {VARIABLE}={TUNABLE}: training waits less for snapshots",
        ),
    ]


def _each(
    nodes: Iterable[NodeFacts],
    about: str,
    problem: Callable[[NodeFacts], str],
    *,
    good: str,
    advice: str,
    level: Level = Level.WARN,
) -> Finding:
    """Return one finding that names every node with a problem, and which."""
    found = [f"{facts.node}: {why}" for facts in nodes if (why := problem(facts))]
    if not found:
        return Finding(level=Level.OK, about=about, message=good)
    return Finding(level=level, about=about, message="; ".join(found), advice=advice)


def _versions(nodes: Iterable[NodeFacts], here: NodeFacts) -> Finding:
    def differing(facts: NodeFacts) -> str:
        return ", ".join(
            f"{name} {facts.versions.get(name, 'is missing')} (here {version})"
            for name, version in here.versions.items()
            if facts.versions.get(name) != version
        )

    return _each(
        nodes,
        "versions",
        differing,
        level=Level.FAIL,
        good=", ".join(f"{name} {version}" for name, version in here.versions.items()),
        advice="install the same on every node: one image, or a runtime environment of Ray",
    )


def _little_shared_memory(facts: NodeFacts) -> str:
    if facts.shared_memory_bytes >= SHARED_MEMORY_BYTES_MIN:
        return ""
    return f"{facts.shared_memory_bytes / (1 << 20):.0f} MiB are free in /dev/shm"


def _capacity(nodes: Sequence[NodeFacts], config: RunConfig) -> list[Finding]:
    """Say how many workers fit now; Ray places each by itself, so nodes are counted one by one."""
    needed = config.worker_resources()
    room = sum(
        min(int(facts.resources.get(name, 0.0) / amount) for name, amount in needed.items())
        for facts in nodes
        if facts.resources
    )
    of_one = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    if room >= config.workers.max:
        message = f"all {config.workers.max} workers fit now"
        return [Finding(level=Level.OK, about="capacity", message=message)]
    message = f"{room} of workers.max={config.workers.max} fit now, each with {of_one}"
    if room >= config.workers.min:
        advice = "the run starts with these and grows when nodes join"
    else:
        advice = f"the run waits for workers.min={config.workers.min}: add nodes, or an autoscaler"
    return [Finding(level=Level.WARN, about="capacity", message=message, advice=advice)]


def report(findings: Sequence[Finding], nodes: Sequence[NodeFacts]) -> dict[str, Any]:
    """Return what ``everstep doctor --json`` prints."""
    return {
        "ok": all(finding.level is not Level.FAIL for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "nodes": [asdict(facts) for facts in nodes],
    }
