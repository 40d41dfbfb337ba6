"""Steps as a whole, made of the lines of single processes. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.benchmarks.peers.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that all of its group committed."""

    step: int
    group: str
    world: int
    first_s: float  #: When the first process had committed it; ``last_s`` when the last one had.
    last_s: float
    pids: tuple[tuple[int, str], ...]  #: The processes that took part, with their nodes.


def whole_steps(events: Iterable[Event]) -> list[Done]:
    """Return the steps that every process of a group committed, in order of their ends.

    Survivors of a fault may still end the step under way, which does not count: the victim is
    missing.
    """
    shared: dict[tuple[int, str, int], dict[int, Event]] = defaultdict(dict)
    for line in events:
        if line["event"] == "committed":
            shared[line["step"], line["group"], line["world"]][line["pid"]] = line
    found = [
        Done(
            step=step,
            group=group,
            world=world,
            first_s=min(line["time"] for line in by_pid.values()),
            last_s=max(line["time"] for line in by_pid.values()),
            pids=tuple((pid, line["node"]) for pid, line in sorted(by_pid.items())),
        )
        for (step, group, world), by_pid in shared.items()
        if len(by_pid) >= world
    ]
    return sorted(found, key=lambda done: done.last_s)


def first_after(done: Iterable[Done], fault_s: float) -> Done | None:
    """Return the first step of which no part was done before a fault."""
    return next((one for one in done if one.first_s > fault_s), None)
