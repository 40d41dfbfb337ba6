"""How long a request for capacity may wait before the next alternative is asked for. Pure.

Alternatives are asked for in the order in which the user names them. What was asked for and refused
stays asked for, so its return is seen by a grant, and costs nothing until then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRules:
    """What may be asked for, and for how long it is waited for.

    Attributes:
        usd_per_hour: Price of the room for one worker, of each alternative in order; 0.0 if it is
            not known.
        guess_s: A machine counts as refused after this, before one of its kind has come. One of a
            cloud comes, and joins the cluster, within one to three minutes.
        late: Later it does after so many times as long as those before it took.
        wait_s_min: But not sooner: where two are asked for, an autoscaler may take turns.
        seen_s: A machine that is seen so soon was there: the cluster is looked at every 2 s.
    """

    usd_per_hour: tuple[float, ...] = (0.0,)
    guess_s: float = 180.0
    late: float = 3.0
    wait_s_min: float = 20.0
    seen_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.usd_per_hour, "there is no alternative"
        assert min(self.usd_per_hour) >= 0.0, f"usd_per_hour={self.usd_per_hour}"

    @property
    def has_choice(self) -> bool:
        """Return whether there is more than one alternative."""
        return len(self.usd_per_hour) > 1


def took_s(
    before_s: float, rules: CapacityRules, *, since_s: float, joined_s: float, now_s: float
) -> float:
    """Return how long a machine takes to come, after a grant on one that joined at ``joined_s``.

    Args:
        before_s: What was returned before, 0.0 if nothing was.
        since_s: Since when it was asked for.
        joined_s: When the machine joined the cluster.
        now_s: When it was granted.
    """
    if joined_s - since_s <= rules.seen_s:
        return before_s
    return max(now_s - since_s, before_s / 2)


def grant_bound_s(took_s: float, rules: CapacityRules) -> float:
    """Return after how long without a grant a request counts as refused.

    Args:
        took_s: How long a machine took to come of late; 0.0 if none came yet.
    """
    return max(rules.late * took_s, rules.wait_s_min) if took_s else rules.guess_s
