"""Decide when a request has waited long enough to request the next alternative too. Pure.

Alternatives are requested in the user's order. Refused requests stay open: they cost nothing, and a
grant shows that capacity has returned.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRules:
    """The alternatives that the run may request, and how long it waits for each."""

    #: Price per hour of the room for one worker, for each alternative in order; 0.0 if unknown.
    usd_per_hour: tuple[float, ...] = (0.0,)
    #: Before any machine of its kind has come, a request counts as refused after this time. A cloud
    #: machine starts and joins the cluster within one to three minutes.
    guess_s: float = 180.0
    #: After the first machine, a request counts as refused after this multiple of the time that
    #: machines took.
    late: float = 3.0
    #: Lower bound for that: of two requests, an autoscaler may serve one after the other.
    wait_s_min: float = 20.0
    #: A machine that joined within this time of the request counts as already there: the cluster is
    #: read every 2 s.
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
    """Return how long a machine takes to come, after a grant at ``now_s``.

    ``before_s`` is the value returned before, 0.0 if there was none. The request was made at
    ``since_s``, and the machine joined the cluster at ``joined_s``.
    """
    if joined_s - since_s <= rules.seen_s:
        return before_s
    return max(now_s - since_s, before_s / 2)


def grant_bound_s(took_s: float, rules: CapacityRules) -> float:
    """Return after how long without a grant a request counts as refused.

    ``took_s`` is how long recent machines took to come; 0.0 if none has come yet.
    """
    return max(rules.late * took_s, rules.wait_s_min) if took_s else rules.guess_s
