"""The inbox of a run: it takes events and has the run's clock. Every part gets it."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.core import events as ev


@dataclass(frozen=True, slots=True)
class Inbox:
    """Takes events. Call both functions on the event loop."""

    at_s: Callable[[], float]  #: Returns the run's age in seconds.
    post: Callable[[ev.Event], None]  #: Takes an event; events are folded in this order.
