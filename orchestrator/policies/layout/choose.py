"""Decide which candidate the workers use, and say why not another one."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from orchestrator.policies.layout.candidates import LayoutRules, candidates
from orchestrator.policies.layout.fit import Rooms, fit, num_workers
from orchestrator.policies.layout.speed import expected_step_s, step_text, was_seen
from ucp_core.layout import ParallelLayout
from ucp_core.numerics import counted

#: The user's degrees stay as long as they leave at most this share of the workers idle.
_IDLE_MAX: Final = 0.25
#: A measured layout replaces the user's only if its step takes less than this share: step times of
#: one layout differ by a few percent.
_FASTER: Final = 0.95
_NUM_ALTERNATIVES: Final = 2


# Cached: the core calls this at each event, and rooms and step times seldom change.
@lru_cache(maxsize=1024)
def choose(
    rooms: Rooms, num_max: int, rules: LayoutRules, num_min: int = 1
) -> ParallelLayout | None:
    """Return the layout of ``num_min`` to ``num_max`` workers; None if there is none.

    The user's layout is chosen if it leaves no worker idle. Otherwise it is the first candidate
    that leaves at most a quarter idle, or the fastest of these if the run has measured both. If all
    leave more idle, it is the one with the most workers.
    """
    offered = min(num_workers(rooms), num_max)
    wish = fit(candidates(rules)[0], rooms, num_max, rules)
    if wish is not None and num_min <= wish.world_size == offered:
        return wish
    fits = (fit(degrees, rooms, num_max, rules) for degrees in candidates(rules))
    found = [layout for layout in fits if layout is not None and layout.world_size >= num_min]
    used = [each for each in found if each.world_size >= offered * (1 - _IDLE_MAX)]
    if not used:
        return max(found, key=lambda each: each.world_size, default=None)
    first, *others = used
    seen = [each for each in others if was_seen(first, rules) and was_seen(each, rules)]
    fastest = min(seen, key=lambda each: expected_step_s(each, rules), default=first)
    is_faster = expected_step_s(fastest, rules) < _FASTER * expected_step_s(first, rules)
    return fastest if is_faster else first


def other_layouts(
    chosen: ParallelLayout, rooms: Rooms, num_max: int, rules: LayoutRules, num_min: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return up to two of the best layouts that were not chosen, and why, for people."""
    offered = min(num_workers(rooms), num_max)
    found, is_slower = [], True
    for degrees in candidates(rules):
        layout = fit(degrees, rooms, num_max, rules)
        if layout == chosen:
            # The candidates before the chosen one are nearer to the user's layout.
            is_slower = False
            continue
        if layout is None:
            found.append((str(degrees), _why_none(degrees, rooms, num_max, rules)))
            continue
        size = layout.world_size
        if size < num_min:
            why = f"uses {counted(size, 'worker')}, and workers.min={num_min}"
        elif size < offered * (1 - _IDLE_MAX):
            why = f"leaves {offered - size} of {offered} workers idle"
        else:
            why = "is slower" if is_slower else "is further from the configured layout"
        found.append((str(layout), why + step_text(layout, rules)))
    return tuple(found[:_NUM_ALTERNATIVES])


def _why_none(degrees: ParallelLayout, rooms: Rooms, num_max: int, rules: LayoutRules) -> str:
    offered = min(num_workers(rooms), num_max)
    largest = fit(degrees, rooms, num_max, replace(rules, refused=()))
    refused = rules.refusal(largest or degrees)
    if refused is not None:
        return f"was refused: {refused.why}"
    if offered < degrees.world_size:
        return f"needs {counted(degrees.world_size, 'worker')}, and there are {offered}"
    if degrees.tp > 1:
        return f"needs {degrees.world_size // degrees.tp} x {degrees.tp} workers, each on one node"
    return f"has {degrees.pp} stages, and a step has too few micro-batches for them"
