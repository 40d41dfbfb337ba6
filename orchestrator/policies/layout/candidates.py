"""The degrees that a layout may have: those that the user sets, or divisors of them.

If a degree divides the heads and layers of a model, so do its divisors. So the planner need not
know the model.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ucp_core.layout import ParallelLayout

#: The axes whose degrees a user sets; ``dp_shard`` follows from the number of workers.
NAMED = ("pp", "dp_replicate", "cp", "tp")
#: Names no single axis: the combination of all degrees is refused, with any number of shards.
WHOLE = "layout"


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that could not train."""

    layout: ParallelLayout
    #: The axis whose degree the script or the model does not support; "" if the layout needs more
    #: memory than a device has; ``WHOLE`` if its first step raised.
    axis: str
    why: str  #: One line for people.

    def rules_out(self, other: ParallelLayout) -> bool:
        """Return whether ``other`` cannot train either.

        A layout needs at least as much memory if its workers hold at least as large a share of the
        state, of each gathered layer, and of each sequence.
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
    tp: int = 1  #: Tensor-parallel ways, all on one node.
    pp: int = 1  #: Pipeline-parallel ways.
    ep: int = 1  #: Expert-parallel ways among the shards; fewer if they do not divide the shards.
    stages_per_worker: int = 1  #: Stages of each worker of a pipeline, at every size.
    fixed: tuple[str, ...] = ()  #: Axes that keep their degree at every size.
    #: Micro-batches of a step over all workers; 0 if unknown. Each pipeline needs as many as it has
    #: workers.
    num_micro_batches: int = 0
    refused: tuple[Refused, ...] = ()  #: Layouts that could not train.
    #: Layouts that trained in this run, each with its step time in seconds.
    steps: tuple[tuple[ParallelLayout, float], ...] = ()

    @property
    def multiple(self) -> int:
        """Return the number of which every full-size number of workers is a multiple."""
        return self.dp_replicate * self.cp * self.tp * self.pp * self.ep

    @property
    def multiple_min(self) -> int:
        """Return the smallest number of workers that form a layout."""
        ways = self.ep if "ep" in self.fixed else 1
        return ways * min(each.world_size for each in candidates(self))

    def may(self, axis: str, degree: int) -> bool:
        """Return whether an axis may have this degree at a smaller size."""
        return axis not in self.fixed or degree == getattr(self, axis)

    def refusal(self, layout: ParallelLayout) -> Refused | None:
        """Return why ``layout`` cannot train; None if no reason is known."""
        return next((each for each in self.refused if each.rules_out(layout)), None)

    def __str__(self) -> str:
        """Return the degrees above 1, by the keys of the configuration."""
        degrees = ((axis, getattr(self, axis)) for axis in (*NAMED, "ep"))
        used = [f"parallel.{axis}={degree}" for axis, degree in degrees if degree > 1]
        return " x ".join(used) or "no degree above 1"


@lru_cache(maxsize=64)
def candidates(rules: LayoutRules) -> tuple[ParallelLayout, ...]:
    """Return the degrees that a layout may have, each with ``dp_shard`` 1, the user's first.

    The others follow by how many workers share a model and sequences, the most first, because users
    cut these for lack of memory. Among equals, more tensor parallelism comes first, then longer
    parts of sequences, then more copies.
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
