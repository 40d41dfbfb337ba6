"""The decision: which of the candidates the workers take, and why no other one."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from orchestrator.policies.layout.candidates import LayoutRules, candidates
from orchestrator.policies.layout.fit import Rooms, fit, num_workers
from ucp_core.layout import ParallelLayout

#: The degrees stay as the user wants them while no larger part of the workers would be idle.
_IDLE_MAX: Final = 0.25
_NUM_ALTERNATIVES: Final = 2


# The core asks at each event, and rooms change seldom.
@lru_cache(maxsize=1024)
def choose(
    rooms: Rooms, num_max: int, rules: LayoutRules, num_min: int = 1
) -> ParallelLayout | None:
    """Return the layout of ``num_min`` to ``num_max`` workers; None if there is none.

    The first candidate that leaves at most a quarter of the workers idle is taken, which is the
    wish where that does; if all leave more, the one with the most workers.
    """
    offered = min(num_workers(rooms), num_max)
    best: ParallelLayout | None = None
    for degrees in candidates(rules):
        layout = fit(degrees, rooms, num_max, rules)
        if layout is None or layout.world_size < num_min:
            continue
        if layout.world_size >= offered * (1 - _IDLE_MAX):
            return layout
        if best is None or layout.world_size > best.world_size:
            best = layout
    return best


def other_layouts(
    chosen: ParallelLayout, rooms: Rooms, num_max: int, rules: LayoutRules, num_min: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return the two best layouts that were not taken, and why, for people; fewer if none are."""
    offered = min(num_workers(rooms), num_max)
    found = []
    for degrees in candidates(rules):
        layout = fit(degrees, rooms, num_max, rules)
        if layout == chosen:
            continue
        if layout is None:
            found.append((str(degrees), _why_none(degrees, rooms, num_max, rules)))
            continue
        size = layout.world_size
        if size < num_min:
            why = f"uses {size} workers, and workers.min={num_min}"
        elif size < offered * (1 - _IDLE_MAX):
            why = f"leaves {offered - size} of {offered} workers idle"
        else:
            why = "is further from what is asked for"
        found.append((str(layout), why))
    return tuple(found[:_NUM_ALTERNATIVES])


def _why_none(degrees: ParallelLayout, rooms: Rooms, num_max: int, rules: LayoutRules) -> str:
    offered = min(num_workers(rooms), num_max)
    largest = fit(degrees, rooms, num_max, replace(rules, refused=()))
    refused = rules.refusal(largest or degrees)
    if refused is not None:
        return f"was refused: {refused.why}"
    if offered < degrees.world_size:
        return f"needs {degrees.world_size} workers, and there are {offered}"
    if degrees.tp > 1:
        return f"needs {degrees.world_size // degrees.tp} x {degrees.tp} workers, each on one node"
    return f"has {degrees.pp} stages, which a step has too few micro-batches for"
