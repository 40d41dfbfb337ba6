"""When the stages of a pipeline compute, and when they wait: a schedule worked out on paper.

Source: 1F1B, the non-interleaved schedule of PipeDream-Flush (arXiv 2006.09503).
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """From when to when, in seconds of a step."""

    low_s: float
    high_s: float


class Mark(NamedTuple):
    """Where a pass begins or ends."""

    at_s: float
    ends: bool


@dataclass
class Stage:
    """One step of one stage."""

    busy: list[Span] = field(default_factory=list)  #: When it computes.
    waits: list[Span] = field(default_factory=list)  #: When it does not, until its last pass.
    #: The marks of its blocks; the first is the beginning of the step.
    marks: list[Mark] = field(default_factory=lambda: [Mark(0.0, ends=True)])


def one_forward_one_backward(
    num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float, num_blocks: int
) -> list[Stage]:
    """Return a step of all stages, whose passes take as long in each; what they send, no time."""
    todo = [_order(num_stages, index, num_micro_batches) for index in range(num_stages)]
    ends_s: dict[tuple[str, int, int], float] = {}
    stages = [Stage() for _ in range(num_stages)]
    while any(todo):
        for index, order in enumerate(todo):
            if not order:
                continue
            kind, number = order[0]
            needs = ("forward", index - 1) if kind == "forward" else ("backward", index + 1)
            is_edge = needs[1] in (-1, num_stages)
            if not is_edge and (*needs, number) not in ends_s:
                continue
            stage = stages[index]
            free_s = stage.busy[-1].high_s if stage.busy else 0.0
            low_s = max(free_s, 0.0 if is_edge else ends_s[(*needs, number)])
            took_s = forward_s if kind == "forward" else backward_s
            ends_s[(kind, index, number)] = low_s + took_s
            if low_s > free_s:
                stage.waits.append(Span(free_s, low_s))
            stage.busy.append(Span(low_s, low_s + took_s))
            stage.marks += _marks(kind, low_s, took_s, num_blocks)
            order.pop(0)
    return stages


def _order(num_stages: int, index: int, num_micro_batches: int) -> list[tuple[str, int]]:
    first = min(num_stages - index, num_micro_batches)
    order = [("forward", number) for number in range(first)]
    for number in range(num_micro_batches):
        order.append(("backward", number))
        if first + number < num_micro_batches:
            order.append(("forward", first + number))
    return order


def _marks(kind: str, low_s: float, took_s: float, num_blocks: int) -> list[Mark]:
    edges = [low_s + took_s * index / num_blocks for index in range(num_blocks + 1)]
    if kind == "backward":
        return [*(Mark(at_s, ends=False) for at_s in edges[:-1]), Mark(edges[-1], ends=True)]
    return [
        Mark(at_s, ends=is_end)
        for pair in pairwise(edges)
        for at_s, is_end in zip(pair, (False, True), strict=True)
    ]
