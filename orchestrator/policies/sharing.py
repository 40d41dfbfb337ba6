"""Decide which runs give workers to which others on a shared cluster. Pure.

A run that lacks workers takes them from runs of lower priority, down to their minimum; runs of
equal priority share evenly. Each run decides only what it gives up, by the same rule and from the
reports of all, so no central decision is needed. Reports are slightly old, so a run that gave
workers waits until the others had time to take them. For a while it gives nothing more to a run
that did not take them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A run's report to the others."""

    run: str  #: Its id on the cluster.
    priority: int = 0  #: A run takes from runs of lower priority.
    num_min: int = 1  #: With fewer workers it does not train.
    #: Whether it has ever trained; from then on it keeps at least ``num_min``.
    has_begun: bool = True
    num_held: int = 0  #: Workers that it has room for, on nodes that stay.
    num_lacking: int = 0  #: How many more it requested and did not get in the time that Ray needs.
    unit: int = 1  #: Its workers come in multiples of this.
    needs: tuple[tuple[str, float], ...] = ()  #: ``(resource, amount)`` of the room for one worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRules:
    """How a run shares."""

    priority: int = 0
    needs: tuple[tuple[str, float], ...] = ()  #: As in ``Share``.
    #: A request counts as not granted after this time; Ray places one within a second if there
    #: is room.
    lack_s: float = 5.0
    #: Workers that were given are taken within this time or not at all: runs ask each other every
    #: two seconds, and Ray places a request in one.
    settle_s: float = 10.0
    #: How long a run gets nothing after it did not take what it was given, because it waits for
    #: something else.
    deaf_s: float = 600.0


class Sharing(NamedTuple):
    """A run's current decision about its share."""

    #: The most workers that it requests and holds; -1 if the others need none of them.
    limit: int = -1
    runs: tuple[str, ...] = ()  #: The runs that need the others, while there is a limit.
    #: No new decision before this time: the workers given last are still on their way.
    settled_s: float = -inf
    given: tuple[str, ...] = ()  #: The runs to which it gave them.
    num_others: int = 0  #: How many workers all others held before.
    #: ``(run, until_s)`` of the runs that did not take what they were given.
    deaf: tuple[tuple[str, float], ...] = ()


def decide(
    before: Sharing, own: Share, others: Sequence[Share], rules: SharingRules, *, now_s: float
) -> Sharing:
    """Return a run's new decision, from its decision ``before`` and the reports of all runs."""
    is_giving = 0 <= before.limit < own.num_held
    deaf = tuple((run, until_s) for run, until_s in before.deaf if until_s > now_s)
    num_others = sum(other.num_held for other in others)
    if before.given and not is_giving and now_s >= before.settled_s:
        if num_others <= before.num_others:
            deaf += tuple((run, now_s + rules.deaf_s) for run in before.given)
        before = before._replace(given=())
    unheard = {run for run, _ in deaf}
    rivals = [
        other
        for other in others
        if other.num_lacking
        and other.priority >= own.priority
        and other.run not in unheard
        and _num_for_one(other, own)
    ]
    if not rivals:
        return Sharing(deaf=deaf)
    if is_giving:
        return before._replace(settled_s=now_s + rules.settle_s)
    if now_s < before.settled_s:
        return before
    heard = [other for other in others if other.run not in unheard]
    names = tuple(sorted(other.run for other in rivals))
    left, given = _after_giving(own, heard)
    if left < own.num_held:
        return Sharing(left, names, now_s + rules.settle_s, given, num_others, deaf)
    limit = before.limit
    if limit >= 0 and all(other.priority == own.priority for other in rivals):
        # Runs that arrive or leave change the shares of all.
        limit = max(limit, min(other.num_held for other in rivals) + own.unit)
    return Sharing(limit, names if limit >= 0 else (), deaf=deaf)


def _after_giving(own: Share, others: Sequence[Share]) -> tuple[int, tuple[str, ...]]:
    """Return how many workers a run keeps, and the runs to which it gives some.

    Runs give in turn, one unit at a time: the lowest priority first, and among equals the run with
    the most.
    """
    shares = {share.run: share for share in (own, *others)}
    held: dict[str, float] = {run: share.num_held for run, share in shares.items()}
    takers: set[str] = set()
    for taker in sorted(shares.values(), key=_place):
        wanted = float(taker.num_lacking)
        # Every run first gets enough to train, then an even share.
        num_due = _num_due(taker, [*shares.values()], held)
        while wanted > 0:
            givers = [giver for giver in shares.values() if _may_give(giver, taker, held, num_due)]
            if not givers:
                break
            giver = min(givers, key=lambda share: (share.priority, -held[share.run], share.run))
            num = _step(giver, held)
            held[giver.run] -= num
            taken = num / _num_for_one(taker, giver)
            held[taker.run] += taken
            wanted -= taken
            if giver.run == own.run:
                takers.add(taker.run)
    return round(held[own.run]), tuple(sorted(takers))


def _may_give(giver: Share, taker: Share, held: dict[str, float], num_due: int) -> bool:
    """Return whether a run may give one more unit; the taker will have ``num_due`` anyway."""
    step = _step(giver, held)
    if not 0 < step <= _num_spare(giver, held) or not _serves(giver, taker, held):
        return False
    if not _trains(taker, held):
        return held[taker.run] < num_due
    if giver.priority < taker.priority:
        return True
    return held[giver.run] - step >= held[taker.run] + step / _num_for_one(taker, giver)


def _serves(giver: Share, taker: Share, held: dict[str, float]) -> bool:
    """Return whether a run gives to another one at all, if it can spare something."""
    if giver.run == taker.run or not _num_for_one(taker, giver):
        return False
    if _trains(giver, held) or giver.priority != taker.priority:
        return giver.priority <= taker.priority
    # If neither trains, one of them gets all; otherwise both might wait for ever.
    return _trains(taker, held) or _missing(taker) < _missing(giver)


def _num_due(taker: Share, shares: Sequence[Share], held: dict[str, float]) -> int:
    """Return how many workers a run that has not trained yet would start with; 0 if too few."""
    spare = sum(
        _num_spare(giver, held) / _num_for_one(taker, giver)
        for giver in shares
        if _serves(giver, taker, held)
    )
    return taker.num_min if held[taker.run] + spare >= taker.num_min else 0


def _trains(share: Share, held: dict[str, float]) -> bool:
    return share.has_begun or held[share.run] >= share.num_min


def _num_spare(share: Share, held: dict[str, float]) -> float:
    """Return how many workers others may take from a run; one that trains keeps its minimum."""
    return held[share.run] - (share.num_min if _trains(share, held) else 0)


def _place(share: Share) -> tuple[int, bool, int, str]:
    """Return the sort key of the runs that take: those that could start come first."""
    return (-share.priority, share.has_begun, *_missing(share))


def _missing(share: Share) -> tuple[int, str]:
    return share.num_min - share.num_held, share.run


def _step(giver: Share, held: dict[str, float]) -> int:
    """Return how many workers a run gives at a time: first those that it cannot use."""
    return int(held[giver.run]) % giver.unit or min(giver.unit, int(held[giver.run]))


def _num_for_one(taker: Share, giver: Share) -> int:
    """Return how many of the giver's workers make room for one of the taker's; 0 if none do."""
    room = dict(giver.needs)
    parts = [
        amount / room.get(name, 0.0) if room.get(name) else inf for name, amount in taker.needs
    ]
    most = max(parts, default=1.0)
    return ceil(most) if most < inf else 0
