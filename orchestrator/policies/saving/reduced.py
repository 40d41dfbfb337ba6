"""Measure how long redundancy was below the configured tolerance; alert if too long. Pure."""

from dataclasses import dataclass
from typing import Final

#: Another available node restores redundancy in seconds; a new machine takes a minute.
ALERT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedTime:
    """An account of the time at reduced redundancy."""

    total_s: float = 0.0  #: Total time, up to the last check.
    for_s: float = 0.0  #: Duration of the current reduction; 0.0 if redundancy is as configured.
    looked_s: float | None = None  #: When the last check was; None before the first.
    is_reduced: bool = False  #: Whether it was reduced then.


def noted(time: ReducedTime, at_s: float, *, is_reduced: bool) -> ReducedTime:
    """Return the account after a check at ``at_s``; until then the previous result held."""
    passed_s = at_s - time.looked_s if time.looked_s is not None and time.is_reduced else 0.0
    return ReducedTime(
        total_s=time.total_s + passed_s,
        for_s=time.for_s + passed_s if is_reduced else 0.0,
        looked_s=at_s,
        is_reduced=is_reduced,
    )


def alert(time: ReducedTime, *, survived: int, tolerance: int) -> tuple[str, ...]:
    """Return the alerts for people, one line or none.

    ``survived`` nodes may be lost now; the configured number is ``tolerance``.
    """
    if time.for_s < ALERT_S:
        return ()
    nodes = "1 node and no more" if survived == 1 else "no node"
    line = (
        f"for {time.for_s:.0f} s the loss of {nodes} would be recovered from memory; "
        f"snapshot.tolerance asks for {tolerance}: add nodes, or lower it"
    )
    return (line,)
