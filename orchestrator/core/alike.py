"""Join consecutive events that report the same about several members.

In a large run, thousands of members leave or form within a second. Deciding on each event and
writing a journal line for each would take several seconds.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from orchestrator.core.events import Event, Leaving, WorkerFormed, WorkerLeft

#: Most events to join at once; joining this many takes a millisecond.
NUM_MAX: Final = 256
#: Ways to leave that can be the same for many members.
_HOW: Final = frozenset({Leaving.FENCED, Leaving.YIELDED, Leaving.PEER_LOST})

_OfMembers: TypeAlias = WorkerFormed | WorkerLeft


def take_alike(events: deque[Event]) -> Event:
    """Take the first of ``events`` and those after it that report the same, as one event."""
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
    """Return whether the event reports nothing that is specific to one worker."""
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
    # The last member determines how long it took.
    return replace(last, at_s=at_s, others=others, sources=tuple(loaded.items()))
