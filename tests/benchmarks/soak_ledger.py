"""What a soak keeps of each fault and each sitting, and what it makes of that in the end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tests.support.history import History

#: Machines of a fault that hurts all of them: no worker is healthy then.
ALL: Final = frozenset(range(-1, 64))


def blamed(
    records: Sequence[Mapping[str, Any]], machines: Mapping[str, int], hurt: Collection[int]
) -> tuple[int, list[str]]:
    """Return how many verdicts name workers, and the workers named that no fault hurt.

    Args:
        records: Of the journal, since the fault.
        machines: The machine of each worker.
        hurt: The machines that the fault, or the one before it, hurt.
    """
    verdicts = [r for r in records if r["kind"] == "ReportIncident" and r["guilty"]]
    healthy = [
        f"{worker}: {record['evidence']}"
        for record in verdicts
        for worker in record["guilty"]
        if machines.get(worker, -1) not in hurt
    ]
    return len(verdicts), healthy


def time_parts(history: History, calm_s: float, wall_s: float) -> dict[str, float]:
    """Return goodput, and where the rest of the time went, as shares of ``wall_s``.

    Args:
        history: Of the run.
        calm_s: How long a step takes with all workers and without a fault.
        wall_s: How long the run was watched.
    """
    committed = history.committed()
    steps_s = sum(line["step_s"] for line in committed)
    useful_s = sum(min(calm_s, line["step_s"]) for line in committed)
    redone_s = sum(line["step_s"] for line in history.lines) - steps_s
    parts = {
        "goodput": useful_s,
        "slower_steps": steps_s - useful_s,
        "redone": redone_s,
        "pauses": wall_s - steps_s - redone_s,
    }
    return {name: round(seconds / wall_s, 4) for name, seconds in parts.items()}


def next_index(lines: Sequence[Mapping[str, Any]], seed: int) -> int:
    """Return the index of the first fault of a seed that has no line."""
    return max((x["fault"] + 1 for x in lines if "fault" in x and x["seed"] == seed), default=0)


def summed(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all faults and sittings together amount to.

    A fault that was made again, because a later sitting began at an earlier index, counts once, as
    it went last.
    """
    faults = {(x["seed"], x["fault"]): x for x in lines if "fault" in x}
    sittings = [x for x in lines if "sitting" in x]
    ended = [x for x in sittings if x["ended"]]
    wall_s = sum(x["wall_s"] for x in ended)
    kinds = Counter(kind for one in faults.values() for kind in one["kinds"])
    return {
        "survived": sum(x["survived"] for x in faults.values()),
        "faults": len(faults),
        "kinds": len(kinds),
        "not_survived": [
            {key: x[key] for key in ("seed", "fault", "kinds", "when", "why", "journal")}
            for x in faults.values()
            if not x["survived"]
        ],
        "sittings": len(sittings),
        "exactly_once": sum(not x["samples"] for x in ended),
        "same_weights": sum(x["same_weights"] for x in ended),
        "ended": len(ended),
        "steps": sum(x["steps"] for x in ended),
        "steps_lost": sum(x["steps_lost"] for x in ended),
        "verdicts": sum(x["verdicts"] for x in faults.values()),
        "healthy_blamed": [each for x in faults.values() for each in x["blamed"]],
        "time": {
            part: round(sum(x["time"][part] * x["wall_s"] for x in ended) / wall_s, 4)
            for part in (ended[0]["time"] if ended else ())
        },
        "at_begin_and_end": [x["resources"] for x in ended],
    }
