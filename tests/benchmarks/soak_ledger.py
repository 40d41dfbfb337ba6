"""Keeps a soak's facts about each fault and each sitting, and summarises them in the end. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tests.support.history import History
from tests.support.train_paced import ORDERED

#: Why a sitting was not ended after a fault that its run did not survive.
LOST: Final = "a fault was not survived"
#: Machines of a fault that hurts all of them: no worker is healthy then.
ALL: Final = frozenset(range(-1, 64))


def blamed(
    records: Sequence[Mapping[str, Any]], machines: Mapping[str, int], hurt: Collection[int]
) -> tuple[int, list[str]]:
    """Return how many verdicts name workers, and the workers named that no fault hurt.

    A worker that raised by order is named rightly: after a recovery another machine may have the
    rank of the order.

    Args:
        records: Records of the journal, since the fault.
        machines: The machine of each worker.
        hurt: The machines that the fault, or the one before it, hurt.
    """
    verdicts = [r for r in records if r["kind"] == "ReportIncident" and r["guilty"]]
    healthy = [
        f"{worker}: {record['evidence']}"
        for record in verdicts
        for worker in record["guilty"]
        if machines.get(worker, -1) not in hurt and ORDERED not in record["evidence"]
    ]
    return len(verdicts), healthy


def redone(records: Sequence[Mapping[str, Any]], step: int) -> tuple[int, int]:
    """Return how many completed steps are done again, and the newest step that counts then.

    Args:
        records: Records of the journal, since the fault.
        step: The newest step before them.
    """
    num_redone = 0
    for record in records:
        if record["kind"] == "StartAttempt":
            num_redone += max(0, step - record["resume_step"])
            step = record["resume_step"]
        elif record["kind"] in ("StepCompleted", "WorkerLeft"):
            step = max(step, record["step"])
    return num_redone, step


def time_parts(
    history: History, calm_s: float, wall_s: float, *, after_step: int = 0
) -> dict[str, float]:
    """Return goodput, and where the rest of the time went, as shares of ``wall_s``.

    As in a run's summary, goodput is the time of the steps that count. ``slower_steps`` is a part
    of it: what those steps took beyond ``calm_s``. The others add up to 1 with it.

    Args:
        history: The steps of a run.
        calm_s: Length of a step without a fault.
        wall_s: The time since ``after_step``.
        after_step: Earlier steps, and this one, belong to the start.
    """
    committed = [line for line in history.committed() if line["step"] > after_step]
    steps_s = sum(line["step_s"] for line in committed)
    redone_s = sum(x["step_s"] for x in history.lines if x["step"] > after_step) - steps_s
    parts = {
        "goodput": steps_s,
        "slower_steps": sum(max(0.0, line["step_s"] - calm_s) for line in committed),
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
        "judged": _num_judged(lines),
        "problems": [
            problem
            for x in sittings
            for problem in (x.get("why", ""), x.get("samples", ""))
            if problem and problem != LOST
        ],
        "faults": len(faults),
        "kinds": len(kinds),
        "strikes": kinds.total() - sum(len(x.get("missed", ())) for x in faults.values()),
        "missed": [each for x in faults.values() for each in x.get("missed", ())],
        "parts_s": _mean_parts([x["parts_s"] for x in faults.values() if "parts_s" in x]),
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
        "most_redone": {
            when: max((x.get("redone", 0) for x in faults.values() if x["when"] == when), default=0)
            for when in ("alone", "together", "recovering")
        },
        "verdicts": sum(x["verdicts"] for x in faults.values()),
        "healthy_blamed": [each for x in faults.values() for each in x["blamed"]],
        "time": {
            part: round(sum(x["time"][part] * x["wall_s"] for x in ended) / wall_s, 4)
            for part in (ended[0]["time"] if ended else ())
        },
        "at_begin_and_end": [x["resources"] for x in ended],
    }


def _mean_parts(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return how long each part of a fault took in the mean."""
    names = dict.fromkeys(name for parts in found for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in found) / len(found) for name in names}


def _num_judged(lines: Sequence[Mapping[str, Any]]) -> int:
    """Return how many faults were made in sittings that ended."""
    found, here = set[tuple[int, int]](), set[tuple[int, int]]()
    for line in lines:
        if "fault" in line:
            here.add((line["seed"], line["fault"]))
        else:
            found |= here if line["ended"] else set()
            here = set()
    return len(found)


def table(result: Mapping[str, Any]) -> str:
    """Return what ``summed`` found as a text to read.

    A growing figure is shown for the sitting in which it grew most.
    """
    faults, ended = result["faults"], result["ended"]
    parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in result["time"].items())
    took = result["parts_s"]
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in took.items())
    healthy = result["healthy_blamed"]
    rows = [
        ("faults survived", f"{result['survived']} of {faults}, of {result['kinds']} kinds"),
        ("strikes", f"{result['strikes']}, and {len(result['missed'])} that found no target"),
        ("sittings ended", f"{ended} of {result['sittings']}"),
        ("faults in those", f"{result['judged']} of {faults}"),
        ("samples exactly once", f"in {result['exactly_once']} of {ended}"),
        ("weights as undisturbed", f"in {result['same_weights']} of {ended}"),
        ("steps", f"{result['steps']}, and {result['steps_lost']} done again"),
        (
            "most of them by one fault",
            ", ".join(f"{n} {w}" for w, n in result["most_redone"].items()),
        ),
        ("healthy workers blamed", f"{len(healthy)}, in {result['verdicts']} verdicts"),
        ("time", parts.replace("_", " ") or "no sitting ended"),
        ("seconds a fault", f"{sum(took.values()):.1f}: {each}" if took else "not known"),
        *((what, f"{begin:g} at begin, {end:g} at end") for what, begin, end in _grown(result)),
    ]
    lost = [
        f"seed {one['seed']} fault {one['fault']} ({', '.join(one['kinds'])}; {one['when']}): "
        f"{one['why'][:300]}; see {one['journal']}"
        for one in result["not_survived"]
    ]
    told = [*(f"not survived: {one}" for one in lost), *(f"blamed: {one}" for one in healthy)]
    told += [f"missed: {one}" for one in result["missed"]]
    told += [f"a sitting: {one[:300]}" for one in result["problems"]]
    return "\n".join([*(f"{name:<32}{found}" for name, found in rows), *told])


def _grown(result: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return of each thing that a sitting used the begin and end of the one where it grew most."""
    found: dict[str, list[tuple[float, float]]] = {}
    for begin, end in (each for each in result["at_begin_and_end"] if len(each) == 2):
        first, last = _flat(begin), _flat(end)
        for what, used in first.items():
            found.setdefault(what, []).append((used, last[what]))
    return [
        (what, *max(each, key=lambda pair: pair[1] / (pair[0] or 1.0)))
        for what, each in found.items()
    ]


def _flat(used: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers by what they count: those of a process have its kind before them."""
    found: dict[str, float] = {}
    for name, number in used.items():
        inner = _flat(number) if isinstance(number, Mapping) else {"": number}
        found.update({f"{name} {what}".strip().replace("_", " "): n for what, n in inner.items()})
    return found
