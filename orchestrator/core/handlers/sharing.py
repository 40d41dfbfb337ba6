"""A cluster that several runs share: what this run leaves to others, and what it reports.

``demand`` requests no more than the limit that this module sets, and releases unused workers above
it; ``planned`` makes members leave at a step boundary.
"""

from math import inf

from orchestrator.core.consequences import CapacityChanged
from orchestrator.core.events import OthersSeen
from orchestrator.core.rules import RunRules
from orchestrator.core.state import TERMINAL, MutableRunState, RunState
from orchestrator.core.transition import Transition
from orchestrator.policies import Share, sharing


def others_seen(transition: Transition, event: OthersSeen) -> None:
    """Decide how many workers to leave to the other runs, given what all lack."""
    run, rules = transition.run, transition.rules
    if run.surveying_until_s != inf:
        return  # it is not known yet what the run has
    own, limit = own_share(run, rules, run=event.run, now_s=transition.now_s), run.sharing.limit
    run.sharing = sharing.decide(
        run.sharing, own, event.others, rules.sharing, now_s=transition.now_s
    )
    if run.sharing.limit != limit:
        # The run may have waited for workers that it left to others: fewer may not hold the model.
        transition.follow(CapacityChanged())


def own_share(
    state: RunState | MutableRunState, rules: RunRules, *, run: str, now_s: float
) -> Share:
    """Return this run's report to the others; ``run`` is its id."""
    offers = [offer for offer in state.fleet.offers if offer.num_pending]
    num_held = state.fleet.num_reservations - sum(offer.num_pending for offer in offers)
    since_s = min((offer.since_s for offer in offers), default=inf)
    # Workers that the run gave away count as lacking, although it no longer requests them.
    is_over = state.phase in TERMINAL
    is_late = state.sharing.limit >= 0 or now_s - since_s >= rules.sharing.lack_s
    num_wanted = rules.wanted(state.most_workers or rules.max_workers, state.refused)
    return Share(
        run=run,
        priority=rules.sharing.priority,
        num_min=rules.min_workers,
        has_begun=bool(state.attempt.members),
        num_held=num_held,
        num_lacking=max(num_wanted - num_held, 0) if is_late and not is_over else 0,
        unit=rules.layout.multiple,
        needs=rules.sharing.needs,
    )
