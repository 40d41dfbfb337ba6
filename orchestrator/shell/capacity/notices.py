"""Notices that nodes will end: from Ray, from keepers, and for the controller's own machine."""

import logging
import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from orchestrator.core import events as ev
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.clock import wall_time
from orchestrator.shell.inbox import Inbox
from workers.protocol import Notice

log = logging.getLogger(__name__)

#: A notice without a time: the run leaves once there is a replacement, at the latest after a year.
FAR_S = 365 * 86400.0
#: The sources of notices: Ray, the node's keeper, the controller for its own machine, a user.
_RAY, _KEEPER, CONTROLLER, _USER = "ray", "keeper", "controller", "user"
#: The text of a user's notice; the page offers to withdraw it.
DRAINED = "drained from the page"


class _Said(NamedTuple):
    """A source's notice for a node, with the end on the run's clock."""

    said: Hashable
    by_s: float
    what: str


class Notices:
    """Merges the notices for each node; the earliest end counts.

    Args:
        views: The nodes; their state follows the notices.
        inbox: Takes ``NodeDraining`` and ``ControllerDraining``.
        drained: Nodes that a user asked the run to leave, and by when; an earlier controller
            recorded them.
    """

    def __init__(
        self,
        views: Mapping[str, NodeView],
        inbox: Inbox,
        here: str,
        drained: Mapping[str, float] | None = None,
    ) -> None:
        self._views = views
        self._inbox = inbox
        self._here = here
        self._known = {
            node: {_USER: _Said(True, by_s, DRAINED)} for node, by_s in (drained or {}).items()
        }

    @property
    def own(self) -> str:
        """Return the source of the notice for the controller's machine; "" if it stays."""
        return _first(self._known.get(self._here, {})).what

    def is_draining(self, node: str) -> bool:
        """Return whether ``node`` got a notice, even if it is dead and Ray has forgotten it."""
        return bool(self._known.get(node))

    def joined(self, node: str) -> None:
        """Forget the notices of a node that is back, so that sources report them again.

        A user gives a notice only once, so the user's notice is reported again here.
        """
        said = self._known.pop(node, {}).get(_USER)
        if said is not None:
            self.on_user(node, said.by_s - self._inbox.at_s())

    def on_ray(self, deadlines_ms: Mapping[str, int]) -> None:
        """Take Ray's notices: a deadline in ms since the epoch by node; 0 for none."""
        for node in {**deadlines_ms, **self._known}:
            said = deadlines_ms.get(node)
            view = self._views.get(node)
            # A pod reports its end to Ray by its own clock, and Ray does not say whose clock it is.
            # Assume the clock that is ahead, so that the run leaves the node too early rather than
            # too late.
            ahead_s = view.clock_ahead_s if view is not None else 0.0
            left_s = said / 1000.0 - wall_time() - ahead_s if said else 0.0
            self._note(node, _RAY, said, left_s, "drained by Ray")

    def on_keeper(self, node: str, notice: Notice | None, source: str = _KEEPER) -> None:
        """Take the notice that a node got for itself; None if it stays."""
        left_s, what = (notice.left_s, notice.what) if notice else (math.inf, "")
        self._note(node, source, notice, left_s, what)

    def on_user(self, node: str, left_s: float) -> None:
        """Record that a user wants the run to leave ``node`` within ``left_s``."""
        self._note(node, _USER, True, left_s, DRAINED)

    def withdraw(self, node: str) -> bool:
        """Withdraw a user's notice; return whether there was one."""
        was = _USER in self._known.get(node, {})
        self._note(node, _USER, None, math.inf, "")
        return was

    def _note(self, node: str, source: str, said: Hashable, left_s: float, what: str) -> None:
        """Report the earliest end of a node if a notice is new, changed or withdrawn.

        Notices of a dead node are neither reported nor withdrawn.
        """
        view = self._views.get(node)
        if (view is None and node != self._here) or (view is not None and view.lost.is_set()):
            return
        known = self._known.setdefault(node, {})
        if (known[source].said if source in known else None) == said:
            return
        was = _first(known)
        at_s = self._inbox.at_s()
        if said is None:
            del known[source]
        else:
            known[source] = _Said(said, at_s + min(max(0.0, left_s), FAR_S), what)
        now = _first(known)
        is_news = now.by_s != was.by_s
        if view is not None:
            view.state, view.notice = "draining" if known else "alive", now.what
            view.taken_s = now.by_s if now.by_s - at_s < FAR_S else math.inf
            if is_news:
                draining = ev.NodeDraining(
                    at_s=at_s, node=node, deadline_s=now.by_s, notice=now.what
                )
                self._inbox.post(draining)
        if node == self._here and is_news:
            log.critical("the provider takes the controller's machine: %s", now.what or "no more")
            self._inbox.post(ev.ControllerDraining(at_s=at_s, deadline_s=now.by_s, notice=now.what))


def _first(known: Mapping[str, _Said]) -> _Said:
    """Return the earliest end; infinity without notices."""
    return min(known.values(), key=lambda each: each.by_s, default=_Said(None, math.inf, ""))
