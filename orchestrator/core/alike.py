"""Events that tell the same of several members and follow one another, as one event.

The members of a large run leave, and form, by thousands in a second. A decision and a line of the
journal for each of them would take several seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from orchestrator.core.events import Event, Leaving, WorkerFormed, WorkerLeft

#: The most that are taken at once: they cost a millisecond.
NUM_MAX: Final = 256
#: Ways to leave that are the same for many.
_HOW: Final = frozenset({Leaving.FENCED, Leaving.YIELDED, Leaving.PEER_LOST})

_OfMembers: TypeAlias = WorkerFormed | WorkerLeft


def take_alike(events: deque[Event]) -> Event:
    """Take the first of ``events``, with those that follow it and tell the same; return them."""
    first = events.popleft()
    if not (isinstance(first, _OfMembers) and _is_plain(first)):
        return first
    alike = [first]
    while events and len(alike) < NUM_MAX:
        other = events[0]
        if not (isinstance(other, _OfMembers) and _is_plain(other) and _are_alike(first, other)):
            break
        events.popleft()
        alike.append(other)
    return first if len(alike) == 1 else _joined(alike)


def _is_plain(event: _OfMembers) -> bool:
    """Return whether it says nothing that is true of one worker only."""
    if event.others or event.damaged or event.skipped:
        return False
    if isinstance(event, WorkerFormed):
        return True
    return event.how in _HOW and not (event.unread or event.unreached or event.told)


def _are_alike(one: _OfMembers, other: _OfMembers) -> bool:
    if isinstance(one, WorkerLeft) and isinstance(other, WorkerLeft):
        ends = ((each.attempt, each.how, each.step, each.detail) for each in (one, other))
        return len(set(ends)) == 1
    return type(one) is type(other) and one.attempt == other.attempt


def _joined(alike: Sequence[_OfMembers]) -> Event:
    last = alike[-1]
    others = (*(each.worker for each in alike[:-1]),)
    at_s = max(each.at_s for each in alike)
    if isinstance(last, WorkerLeft):
        return replace(last, at_s=at_s, others=others)
    loaded: Counter[str] = Counter()
    for each in alike:
        loaded.update(dict(each.sources) if isinstance(each, WorkerFormed) else {})
    # Those that come last decide how long it took.
    return replace(last, at_s=at_s, others=others, sources=tuple(loaded.items()))
