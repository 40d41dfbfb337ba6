"""Answers of keepers about whom they reach, and when to ask again about lost links."""

from __future__ import annotations

from orchestrator.core.actions import ProbeLinks
from orchestrator.core.events import LinksProbed
from orchestrator.core.handlers import demand, formation, recovery
from orchestrator.core.network import links, reach, search
from orchestrator.core.state import ACTIVE, Phase
from orchestrator.core.transition import Transition
from orchestrator.policies import FaultKind


def links_probed(transition: Transition, event: LinksProbed) -> None:
    """Take the answer: who trains next reach each other, and what was lost is known."""
    run = transition.run
    network = run.network
    asked = set(event.pairs)
    is_search = network.is_searching and event.number == network.search
    if is_search:
        members = set(network.asked)
        asked |= {link.ends for link in network.links if members >= set(link.ends)}
        found = tuple(way for way in event.lost if members >= set(way))
        is_sound = not found and members <= set(event.heard)
        run.network = network._replace(found=found, is_sound=is_sound)
        search.give_up(transition)
    search.note(transition, event.lost, heard=event.heard, asked=asked)
    if is_search and run.phase in ACTIVE:
        _look_at_attempt(transition)
    elif run.network.found and is_search:
        # What is held behind a lost link cannot be loaded: read again without it.
        run.reads.bad_from = run.reads.num + 1
        run.reads.seen = False
    recovery.proceed(transition)
    if run.phase is Phase.WAITING:
        formation.try_start(transition)
    demand.replace_unreached(transition)


def _look_at_attempt(transition: Transition) -> None:
    """End an attempt that cannot go on; leave one alone that only takes its time."""
    run = transition.run
    forms = run.phase is Phase.FORMING
    if run.network.found:
        what = "had not formed" if forms else "waited for each other"
        recovery.fault(transition, FaultKind.UNDECIDED, (), f"the members {what}")
    elif forms:
        run.deadline_s = search.form_deadline_s(transition)


def ask(transition: Transition) -> None:
    """Probe the links that are due, and see to it that later ones are."""
    run = transition.run
    known, pairs = links.due(run.network.links, transition.now_s)
    if pairs:
        number = run.network.num_probes + 1
        run.network = run.network._replace(links=known, num_probes=number)
        transition.actions.append(ProbeLinks(number=number, pairs=pairs))
    transition.wake_by(links.wake_s(known, transition.now_s))
    if run.phase is Phase.WAITING:
        # A link may have been whole for its pause, or none is hoped for any more.
        formation.try_start(transition)
        demand.replace_unreached(transition)
        transition.wake_by(reach.patience_end_s(transition))
