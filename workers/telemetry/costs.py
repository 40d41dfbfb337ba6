"""Compute the costs of a rank's steps from the spans of its own work."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from workers.protocol import StepCost


class Span(NamedTuple):
    """A finished span; ``own_s`` is its time without the rank's waits for others.

    On a device ``own_s`` is 0.0 if unknown. ``tokens`` is the number of tokens read; 0 if unknown.
    """

    op: str
    step: int
    micro_batch: int
    own_s: float
    tokens: int = 0


class Costs:
    """Adds up spans to steps. A step ends with its ``optimizer`` span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._has_gap = False

    def add(
        self, spans: Sequence[Span], *, has_gap: bool = False, on_device: bool = False
    ) -> tuple[StepCost, ...]:
        """Return the costs of the steps that end with these spans, oldest first.

        ``spans`` follow those added before. ``has_gap`` says that spans before them are lost, so
        the cost of their step is unknown. On a device, only spans with a known device time count.
        """
        if has_gap:
            self._spans, self._has_gap = [], True
        costs: list[StepCost] = []
        for span in spans:
            if span.op != "optimizer":
                self._spans.append(span)
                continue
            cost_of = _device_cost if on_device else _cost
            cost = None if self._has_gap else cost_of(span.step, self._spans)
            costs += [cost] if cost is not None else []
            self._spans, self._has_gap = [], False
        return tuple(costs)


def _cost(step: int, spans: Sequence[Span]) -> StepCost | None:
    """Return the cost of a step from its spans; None without a forward or backward pass.

    Several pipeline stages on one rank each have a span of each micro-batch, and all are added.
    """
    compute: dict[int, float] = defaultdict(float)
    waits: list[float] = []
    for span in spans:
        # A step that was started and abandoned has no optimizer span of its own.
        if span.step == step and span.op == "data":
            waits.append(span.own_s)
        elif span.step == step:
            compute[span.micro_batch] += span.own_s
    if not compute:
        return None
    least = min(compute, key=lambda number: compute[number])
    tokens = _tokens(step, spans, (least,))
    return StepCost(step, compute[least], fmean(waits) if waits else 0.0, tokens)


def _device_cost(step: int, spans: Sequence[Span]) -> StepCost | None:
    """Return the cost of a step from its spans; None if no forward or no backward pass is known.

    The first pass may gather parameters in its forward, the last one reduce in its backward, so the
    fastest forward and the fastest backward may come from different passes.
    """
    known: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for span in spans:
        if span.step == step and (span.own_s or span.op == "data"):
            known[span.op].append((span.own_s, span.micro_batch))
    if not known["forward"] or not known["backward"]:
        return None
    (forward_s, one), (backward_s, other) = min(known["forward"]), min(known["backward"])
    data_s = fmean(wait_s for wait_s, _ in known["data"]) if known["data"] else 0.0
    return StepCost(step, forward_s + backward_s, data_s, _tokens(step, spans, (one, other)))


def _tokens(step: int, spans: Sequence[Span], micro_batches: Collection[int]) -> int:
    read = (one for one in spans if one.step == step and one.micro_batch in micro_batches)
    return max((one.tokens for one in read), default=0)
