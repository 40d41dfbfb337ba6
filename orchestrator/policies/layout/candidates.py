"""The degrees that a layout may have: those that the user names, or divisors of them.

A divisor of a degree that a model was made for divides its heads and layers, too, so the model need
not be known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ucp_core.layout import ParallelLayout

#: The axes that a user names a degree of; ``dp_shard`` follows from the workers.
NAMED = ("pp", "dp_replicate", "cp", "tp")
#: In place of an axis: all degrees together are refused, with any number of shards.
WHOLE = "layout"


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that could not train."""

    layout: ParallelLayout
    #: The axis whose degree the script or the model cannot have; "" if a device has too little
    #: memory for the layout; ``WHOLE`` if its first step raised.
    axis: str
    why: str  #: One line for people.

    def rules_out(self, other: ParallelLayout) -> bool:
        """Return whether ``other`` could not train either.

        A layout needs as much memory if its workers hold as large a share of the state, of each
        layer that they gather, and of each sequence.
        """
        refused = self.layout
        if self.axis == WHOLE:
            return _degrees(other) == _degrees(refused)
        if self.axis:
            return bool(getattr(other, self.axis) == getattr(refused, self.axis))
        cut, refused_cut = other.tp * other.pp, refused.tp * refused.pp
        return (
            cut <= refused_cut
            and other.cp <= refused.cp
            and cut * other.dp_shard * other.cp <= refused_cut * refused.dp_shard * refused.cp
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """The layout of the full size, and what may change at another one."""

    dp_replicate: int = 1  #: Full copies of the model.
    cp: int = 1  #: Parts of each sequence.
    tp: int = 1  #: Tensor-parallel ways; all of them are on one node.
    pp: int = 1  #: Pipeline-parallel ways.
    ep: int = 1  #: Expert-parallel ways among the shards; fewer where their number is no multiple.
    stages_per_worker: int = 1  #: Stages that each worker of a pipeline has, at every size.
    fixed: tuple[str, ...] = ()  #: Axes that have this degree at every size.
    #: All micro-batches of a step; 0 if that is not known. Each pipeline needs as many as it has
    #: workers.
    num_micro_batches: int = 0
    refused: tuple[Refused, ...] = ()  #: Layouts that could not train.
    #: Layouts that trained in this run, each with the seconds of a step.
    steps: tuple[tuple[ParallelLayout, float], ...] = ()

    @property
    def multiple(self) -> int:
        """Return the number that workers come in multiples of at the full size."""
        return self.dp_replicate * self.cp * self.tp * self.pp * self.ep

    @property
    def multiple_min(self) -> int:
        """Return the fewest workers that make a layout."""
        ways = self.ep if "ep" in self.fixed else 1
        return ways * min(each.world_size for each in candidates(self))

    def may(self, axis: str, degree: int) -> bool:
        """Return whether an axis may have this degree at a smaller size."""
        return axis not in self.fixed or degree == getattr(self, axis)

    def refusal(self, layout: ParallelLayout) -> Refused | None:
        """Return why ``layout`` cannot train, if that is known."""
        return next((each for each in self.refused if each.rules_out(layout)), None)

    def __str__(self) -> str:
        """Return the degrees above 1, as the configuration names them."""
        degrees = ((axis, getattr(self, axis)) for axis in (*NAMED, "ep"))
        used = [f"parallel.{axis}={degree}" for axis, degree in degrees if degree > 1]
        return " x ".join(used) or "no degree above 1"


@lru_cache(maxsize=64)
def candidates(rules: LayoutRules) -> tuple[ParallelLayout, ...]:
    """Return the degrees that a layout may have, each with ``dp_shard`` 1, the wish first.

    The others follow by how much of a model and of sequences a worker still shares with others of
    its group, since users cut them for want of memory; among equals the one with more tensor
    parallelism is first, then the one with longer parts of sequences, then with more copies.
    """
    degrees = [
        [degree for degree in range(1, wish + 1) if wish % degree == 0 and rules.may(axis, degree)]
        for axis, wish in ((axis, getattr(rules, axis)) for axis in NAMED)
    ]
    found = [
        ParallelLayout(pp=pp, dp_replicate=copies, cp=cp, tp=tp)
        for pp, copies, cp, tp in product(*degrees)
    ]
    return tuple(sorted(found, key=_rank))


def _degrees(one: ParallelLayout) -> tuple[int, ...]:
    return tuple(getattr(one, axis) for axis in (*NAMED, "ep"))


def _rank(degrees: ParallelLayout) -> tuple[int, ...]:
    shared = degrees.tp * degrees.pp * degrees.cp
    return -shared, -degrees.tp, degrees.cp, -degrees.dp_replicate
