"""Summarize the suspicions of a run in a few lines. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from orchestrator.diagnosis import Suspicion, listed
from orchestrator.fault_kinds import FaultKind

#: Suspicions that follow one another within this time belong together: with a load of 15 on 2 cores
#: they came 80 s apart.
TOGETHER_S = 300.0
#: Kinds of suspicion that another program on the machine can cause, while the rank is healthy.
BY_OTHER_WORK = frozenset({FaultKind.SLOW_COMPUTE, FaultKind.SLOW_DATA, FaultKind.ABSENT})


def in_few_lines(suspicions: Sequence[Suspicion]) -> list[tuple[float, str]]:
    """Return ``(since_s, sentence)`` of suspicions, oldest first.

    Repeated suspicions become one line, and so do suspicions that change ranks.
    """
    lines: list[tuple[float, str]] = []
    for spell in _spells(suspicions):
        if _goes_round(spell):
            lines.append((spell[0].since_s, _busy(spell)))
            continue
        alike: dict[object, list[Suspicion]] = {}
        for one in spell:
            alike.setdefault((one.kind, one.guilty), []).append(one)
        for first, *more in alike.values():
            times = f" ({len(more)} times more in {_minutes(more[-1], first)})" if more else ""
            lines.append((first.since_s, first.evidence + times))
    return sorted(lines, key=lambda line: line[0])


def busy(suspicions: Sequence[Suspicion], at_s: float) -> str:
    """Return a line that machines are busy at ``at_s``; "" unless suspicions change ranks."""
    spells = [spell for spell in _spells(suspicions) if spell[-1].since_s >= at_s - TOGETHER_S]
    return next((_busy(spell) for spell in spells if _goes_round(spell)), "")


def suspects_shown(suspects: Sequence[Mapping[str, Any]], busy_now: str) -> list[Mapping[str, Any]]:
    """Return the suspects to show; one row for busy machines replaces the ranks on them."""
    if not busy_now:
        return list(suspects)
    row = {"kind": "busy", "guilty": "", "worker": "", "evidence": busy_now}
    return [row, *(one for one in suspects if one["kind"] not in BY_OTHER_WORK)]


def _spells(suspicions: Sequence[Suspicion]) -> list[list[Suspicion]]:
    """Group suspicions in time: what other work may cause together, others by kind and rank."""
    spells: list[list[Suspicion]] = []
    open_spells: dict[object, list[Suspicion]] = {}
    for one in sorted(suspicions, key=lambda one: one.since_s):
        key = "work" if one.kind in BY_OTHER_WORK else (one.kind, one.guilty)
        spell = open_spells.get(key)
        if spell is None or one.since_s - spell[-1].since_s > TOGETHER_S:
            spells.append(spell := [])
            open_spells[key] = spell
        spell.append(one)
    return spells


def _goes_round(spell: Sequence[Suspicion]) -> bool:
    """Return whether most suspicions name other ranks than the one before them.

    A worker that is really slow is named repeatedly, with only a few others in between.
    """
    num_turns = sum(one.guilty != after.guilty for one, after in pairwise(spell))
    return num_turns >= max(2, (len(spell) - 1) / 2)


def _busy(spell: Sequence[Suspicion]) -> str:
    ranks = listed(rank for one in spell for rank in one.guilty.ranks)
    return (
        f"R{ranks[1:]} seemed slow in turn, {len(spell)} times in {_minutes(spell[-1], spell[0])}: "
        "other work keeps the machines busy, and no single worker is slow"
    )


def _minutes(last: Suspicion, first: Suspicion) -> str:
    took_s = last.since_s - first.since_s
    return f"{took_s:.0f} s" if took_s < TOGETHER_S else f"{took_s / 60.0:.0f} min"
