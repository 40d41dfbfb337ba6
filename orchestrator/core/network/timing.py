"""Slow links as keepers measured them. The next order of nodes and copies avoids them."""

from orchestrator.core.events import LinksTimed, TrafficMeasured
from orchestrator.core.transition import Transition


def links_timed(transition: Transition, event: LinksTimed) -> None:
    """Note which links are slow; links that were not timed stay as they were."""
    network = transition.run.network
    timed = set(event.nodes)
    kept = (one for one in network.slow if not timed >= {*one[:2]} - {""})
    transition.run.network = network._replace(
        slow=tuple(sorted({*kept, *event.slow})), without_slow=event.step_ratio
    )


def traffic_measured(transition: Transition, event: TrafficMeasured) -> None:
    """Note what a step sends; the next plan of copies avoids the links that a step fills."""
    transition.run.sent = event.sent
