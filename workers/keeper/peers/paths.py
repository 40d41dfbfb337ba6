"""Decide when a copy uses another path through the network, leaves one, or looks for one. Pure.

Switches hash a connection's addresses and ports to one of several equal-cost paths, by a function
that hosts do not know. So paths are measured. An idle path answers a handshake at once; on a path
that training or another copy fills, the handshake waits in a queue. Three rules follow:

- A stream is added only over a path that was idle for a second while the others sent, and stays
  only if all streams together became faster. So two streams are on two paths, and a single path has
  one stream.
- A stream that loses a third of its speed, or never had its share, is suspended, because other
  traffic came or the path became slow. Then its path is measured without it. If the path is idle,
  it is only slow, and is used again. Otherwise other traffic fills it, and the stream stays off it.
- After each path that was left, the next search waits longer, so that searches rarely disturb
  bursts of training.

Switches of C4P allocate paths (arXiv 2406.04594). Clove measures round trips for this (CoNEXT
2017).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

#: Period of ``Paths.observe``, and the number of periods over which a rate is measured.
LOOK_S: Final = 0.1
_WINDOW: Final = 4
#: A rate below this share of the earlier or the fastest rate means that the path has other traffic.
_SHARE: Final = 0.65
#: An added stream stays if all streams together gain this much.
_GAIN: Final = 1.04
#: Seconds until TCP has found the speed of a path that is new, or that fewer streams share.
_SETTLE_S: Final = 0.6
#: Pauses before the next search: after leaving a path, growing by this factor each time unless the
#: last time was long ago; and after finding no idle path.
_LEFT_S, _LEFT_S_MAX, _LONGER = 0.4, 120.0, 3.0
_NONE_S, _NONE_S_MAX = 0.4, 5.0
_FORGET_S: Final = 10.0
#: A handshake meets no queue if it takes at most twice the shortest one seen, plus this; or if it
#: exceeds the shortest by at most this share of the longest one of the same search.
_IDLE_S: Final = 250e-6
_IDLE_SHARE: Final = 0.2
#: A stream is added once every search for this long found an idle path, because training sends in
#: bursts.
_LONG_S: Final = 1.0
_AGAIN_S: Final = 0.2


class Action(Enum):
    """A decision about the streams."""

    NOTHING = "nothing"
    LOOK = "look for an idle path, and add a stream over it"
    MOVE = "look for an idle path, and replace the stream by one over it"
    LEAVE = "end the stream"


@dataclass(slots=True)
class _StreamFacts:
    #: Times, and bytes received until then.
    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    usual: float = 0.0  #: The best rate since the streams changed, in bytes a second.
    is_slow: bool = False  #: Whether its path is slow by itself.

    @property
    def rate(self) -> float:
        """Return the bytes a second over the window."""
        (first_s, first), (last_s, last) = self.seen[0], self.seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class Paths:
    """The streams of a peer, at most ``num_max``, and what was learned about the paths to it."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._streams: dict[int, _StreamFacts] = {}
        self._least_s = inf
        #: Time before which streams are not judged, because they changed.
        self._settled_s = 0.0
        #: The stream on trial, and the rate of all streams before it.
        self._trial: tuple[int, float] | None = None
        self._left = False
        self._look_s = 0.0
        self._left_s, self._left_at_s = _LEFT_S, -inf
        self._none_s = _NONE_S
        #: Time since which every search found an idle path.
        self._idle_s = inf

    def observe(self, now_s: float, received: Mapping[int, int]) -> tuple[Action, int]:
        """Return the decision, and the stream that it is about.

        ``received`` has the bytes that each reading stream has received so far.
        """
        self._streams = {key: x for key, x in self._streams.items() if key in received}
        for key, number in received.items():
            self._streams.setdefault(key, _StreamFacts()).seen.append((now_s, number))
        if now_s < self._settled_s or not received:
            return Action.NOTHING, 0
        rates = {key: each.rate for key, each in self._streams.items()}
        if self._trial is not None:
            (key, before), self._trial = self._trial, None
            if key in rates and sum(rates.values()) < _GAIN * before:
                found = self._leave(now_s, key)
                self._left = False
                return found
        fastest = max(rates.values())
        for key, each in self._streams.items():
            has_lost = rates[key] < _SHARE * each.usual
            if has_lost or (rates[key] < _SHARE * fastest and not each.is_slow):
                if len(rates) > 1:
                    return self._leave(now_s, key)
                each.usual = rates[key]
                self._idle_s = now_s - _LONG_S
                return Action.MOVE, key
            each.usual = max(each.usual, rates[key])
        if now_s >= self._look_s and len(rates) < self._num_max:
            return Action.LOOK, 0
        return Action.NOTHING, 0

    def begin(self, now_s: float) -> None:
        """Note that a copy begins, after a time in which nothing was sent."""
        self._settled_s = now_s + _SETTLE_S
        for each in self._streams.values():
            each.seen.clear()

    def is_idle(self, now_s: float, round_trips_s: Sequence[float]) -> bool:
        """Return whether there is a path for another stream; if not, plan the next search.

        There is an idle path only if some handshakes meet a queue and others do not. If none does,
        the network limits nothing; if all do, all paths may be filled.

        ``round_trips_s`` are those of handshakes from several ports at the same time, sorted;
        infinity for unfinished ones.
        """
        best_s, worst_s = round_trips_s[0], round_trips_s[-1]
        least_s = self._least_s = min(self._least_s, best_s)
        longest_s = max((each for each in round_trips_s if each < inf), default=inf)
        idle_s = least_s + max(least_s + _IDLE_S, _IDLE_SHARE * (longest_s - least_s))
        if best_s > idle_s or worst_s < 2 * best_s + _IDLE_S:
            self._left, self._idle_s = False, inf
            self._look_s = now_s + self._none_s
            self._none_s = min(2 * self._none_s, _NONE_S_MAX)
            return False
        self._idle_s = min(self._idle_s, now_s)
        self._look_s, self._none_s = now_s + _AGAIN_S, _NONE_S
        return now_s - self._idle_s >= _LONG_S

    def note_added(self, now_s: float, key: int) -> None:
        """Note a new stream over an idle path."""
        rates = [each.rate for each in self._streams.values()]
        if rates:
            self._trial = key, sum(rates)
        self._streams[key] = _StreamFacts(is_slow=self._left)
        self._left, self._idle_s = False, inf
        self._change(now_s)
        self._look_s = now_s + _SETTLE_S

    def _leave(self, now_s: float, key: int) -> tuple[Action, int]:
        del self._streams[key]
        if now_s - self._left_at_s > _FORGET_S + 2 * self._left_s:
            self._left_s = _LEFT_S
        self._left, self._idle_s, self._left_at_s = True, inf, now_s
        self._look_s = now_s + self._left_s
        self._left_s = min(_LONGER * self._left_s, _LEFT_S_MAX)
        self._change(now_s)
        return Action.LEAVE, key

    def _change(self, now_s: float) -> None:
        """Forget the rates that streams had beside other streams."""
        self._settled_s = now_s + _SETTLE_S
        for each in self._streams.values():
            each.usual = 0.0
            each.seen.clear()
