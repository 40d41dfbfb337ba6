"""One event being folded: the mutable state, the rules, the time and the actions so far."""

from __future__ import annotations

from orchestrator.core.actions import Action
from orchestrator.core.rules import RunRules
from orchestrator.core.state import MutableRunState


class Transition:
    """What the handlers pass along while they fold one event.

    Attributes:
        run: The state under change.
        rules: Of the run.
        now_s: ``at_s`` of the event.
        actions: What the shell is to do, in order.
    """

    __slots__ = ("actions", "now_s", "rules", "run")

    def __init__(self, run: MutableRunState, rules: RunRules, now_s: float) -> None:
        self.run = run
        self.rules = rules
        self.now_s = now_s
        self.actions: list[Action] = []

    def wake_by(self, at_s: float) -> None:
        """Have the fleet's bounds checked no later than ``at_s``."""
        self.run.fleet.wake_s = min(self.run.fleet.wake_s, at_s)
