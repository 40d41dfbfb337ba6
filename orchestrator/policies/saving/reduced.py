"""How long redundancy was below what was asked for, and when to alert. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: A lost node is made up for in seconds where there is another, and a new machine takes a minute.
ALERT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedTime:
    """An account of the time at reduced redundancy."""

    total_s: float = 0.0  #: All of it, up to the last look.
    for_s: float = 0.0  #: Length of the present stretch; 0.0 if redundancy is as asked for.
    looked_s: float | None = None  #: When that was; None before the first look.
    is_reduced: bool = False  #: What was seen then.


def noted(time: ReducedTime, at_s: float, *, is_reduced: bool) -> ReducedTime:
    """Return the account after a look at ``at_s``: the last finding lasted until now."""
    passed_s = at_s - time.looked_s if time.looked_s is not None and time.is_reduced else 0.0
    return ReducedTime(
        total_s=time.total_s + passed_s,
        for_s=time.for_s + passed_s if is_reduced else 0.0,
        looked_s=at_s,
        is_reduced=is_reduced,
    )


def alert(time: ReducedTime, *, survived: int, tolerance: int) -> tuple[str, ...]:
    """Return what to tell people, a line or none.

    Args:
        survived: How many nodes may be lost now.
        tolerance: How many that are to be.
    """
    if time.for_s < ALERT_S:
        return ()
    nodes = "1 node and no more" if survived == 1 else "no node"
    line = (
        f"for {time.for_s:.0f} s the loss of {nodes} would be recovered from memory; "
        f"snapshot.tolerance asks for {tolerance}: add nodes, or lower it"
    )
    return (line,)
