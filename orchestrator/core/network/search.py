"""Search for a lost link after a fault that names no worker, and probe lost links.

The keepers of all members probe one another. If they find a lost link, it is the cause of the
fault, and only nodes that reach each other train next.
"""

from collections.abc import Collection
from dataclasses import replace
from math import inf

from orchestrator.core.actions import ProbeLinks
from orchestrator.core.consequences import (
    AttemptFailed,
    LinksDue,
    ReachChanged,
    RecoveryAdvanced,
    SearchAnswered,
)
from orchestrator.core.events import LinksProbed
from orchestrator.core.network import links
from orchestrator.core.state import CONTROLLER, Pair
from orchestrator.core.transition import Transition
from orchestrator.fault_kinds import FaultKind

#: Faults that a lost link may cause, besides sources that could not be read.
_NAMELESS = frozenset({FaultKind.UNDECIDED, FaultKind.PEER_LOST})
#: The network is probed if forming takes this many times as long as before, but not before these
#: seconds plus a time for each node. A first model may take longer to build, but the probe disturbs
#: no training.
_FORM_FACTOR = 3.0
_FORM_S = 3.0
_FORM_NODE_S = 0.02
#: How many suspected ways to keep. A failed switch cuts off a whole rack of machines.
_SUSPECTS_MAX = 64


def begin(transition: Transition) -> None:
    """Have the keepers of all members probe one another, unless a probe is under way.

    Keepers that members could not read from take part, too.
    """
    run = transition.run
    members = (run.fleet.nodes[number].name for number, _ in run.attempt.placed)
    holders = (node for _, _, node, *_ in run.attempt.unread if _is_there(transition, node))
    names = tuple(name for name in dict.fromkeys((*members, *holders)) if name)
    if transition.now_s < run.network.until_s < inf or len(names) < 2:  # noqa: PLR2004
        return
    number = run.network.num_probes + 1
    run.network = run.network._replace(
        num_probes=number,
        search=number,
        begun_s=transition.now_s,
        asked=names,
        until_s=transition.now_s + transition.rules.bounds.probe_s,
    )
    transition.actions.append(ProbeLinks(number=number, nodes=names))


def begin_if_nameless(transition: Transition) -> None:
    """Begin if no worker is to blame for the attempt's end and no search for it has begun."""
    cause, network = transition.run.cause, transition.run.network
    is_new = cause is not None and network.begun_s < cause.at_s and not network.found
    if is_new and _is_nameless(transition):
        begin(transition)


def _is_nameless(transition: Transition) -> bool:
    cause = transition.run.cause
    if cause is None:
        return False
    return cause.kind in _NAMELESS or (
        cause.kind is FaultKind.UNLOADABLE and bool(transition.run.attempt.unread)
    )


def is_awaited(transition: Transition) -> bool:
    """Return whether an answer that decides what the fault was is still due."""
    until_s = transition.run.network.until_s
    return transition.now_s < until_s < inf and _is_nameless(transition)


def give_up(transition: Transition) -> None:
    """Stop waiting for an answer."""
    transition.run.network = transition.run.network._replace(until_s=inf)


def restart(transition: Transition) -> None:
    """Forget the search of the last attempt and what it found."""
    forget(transition)
    network = transition.run.network
    transition.run.network = network._replace(suspects=(), suspects_before=network.suspects)


def forget(transition: Transition) -> None:
    """Forget the search and its findings: the next fault is another one."""
    network = transition.run.network
    if network.search:
        transition.run.network = network._replace(
            search=0, begun_s=-inf, asked=(), until_s=inf, found=(), is_sound=False
        )


def form_deadline_s(transition: Transition) -> float:
    """Return when to probe the network next while the attempt forms, or the bound of forming."""
    run = transition.run
    started_s = run.attempt.started_s
    first_s = max(_FORM_FACTOR * run.form_s, _FORM_S + _FORM_NODE_S * run.attempt.num_nodes)
    # The time between two probes doubles.
    look_s = max(first_s, 2.0 * (transition.now_s - started_s))
    return started_s + min(look_s, transition.rules.bounds.form_bound_s(run.num_stuck))


def note(
    transition: Transition,
    lost: Collection[Pair],
    *,
    heard: Collection[str] = (),
    asked: Collection[Pair] = (),
) -> None:
    """Note which ways between living nodes are lost (``links.noted``)."""
    run, now_s = transition.run, transition.now_s
    lost = [way for way in lost if all(_is_there(transition, end) for end in way)]
    known = links.noted(run.network.links, lost=lost, heard=heard, asked=asked, now_s=now_s)
    run.network = run.network._replace(links=known)
    transition.wake_by(links.wake_s(known, now_s))


def _is_there(transition: Transition, name: str) -> bool:
    fleet = transition.run.fleet
    number = fleet.node_ids.get(name)
    return name == CONTROLLER or (number is not None and fleet.nodes[number].alive)


def suspect(transition: Transition, way: Pair) -> None:
    """Note that a member's transport calls a way unreachable; keep ``_SUSPECTS_MAX``."""
    network = transition.run.network
    if way not in network.suspects and len(network.suspects) < _SUSPECTS_MAX:
        transition.run.network = network._replace(suspects=(*network.suspects, way))


def is_program(transition: Transition) -> bool:
    """Return whether a fault that names no worker can only come from the program.

    It can if the keepers of all nodes reach each other, now and in the recent past, and if every
    member left when fenced. Otherwise the fault may pass: the run waits, longer each time.
    """
    attempt, network = transition.run.attempt, transition.run.network
    names = {transition.run.fleet.nodes[number].name for number, _ in attempt.placed}
    is_sound = network.is_sound or len(names) == 1
    # An unstable link may be whole when it is probed.
    flaps = any(names >= set(link.ends) for link in network.links)
    return is_sound and not flaps and not attempt.killed


def explain(transition: Transition) -> None:
    """Make lost links the cause of a fault that names no worker."""
    run = transition.run
    cause, network = run.cause, run.network
    if cause is None or not _is_nameless(transition):
        return
    found, seen, rule = network.found, "none that carries data", "probed"
    if not found:
        # The transport reported the way twice: it may meet a failure that a probe does not.
        found = tuple(way for way in network.suspects if way in network.suspects_before)
        seen, rule = "the transport says so again, and a probe found nothing", "transport"
        note(transition, found)
    if found:
        evidence = f"{links.described(found)} ({seen}); before: {cause.evidence}"
        run.cause = replace(
            cause,
            kind=FaultKind.LINK,
            evidence=evidence,
            rule=rule,
            verdict=FaultKind.LINK_DEAD.value,
        )
    elif network.is_sound:
        evidence = f"{cause.evidence}; the {len(network.asked)} nodes reach each other"
        run.cause = replace(cause, evidence=evidence)


def links_probed(transition: Transition, event: LinksProbed) -> None:
    """Take the answer of keepers: note the lost links and what the search found."""
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
        give_up(transition)
    note(transition, event.lost, heard=event.heard, asked=asked)
    if is_search:
        transition.follow(SearchAnswered())
    transition.follow(RecoveryAdvanced())
    transition.follow(ReachChanged())


def answered_training(transition: Transition, _: SearchAnswered) -> None:
    """End an attempt that cannot continue; leave one alone that is only slow."""
    _end_if_found(transition, "members waited for what did not come")


def answered_forming(transition: Transition, _: SearchAnswered) -> None:
    """End an attempt that cannot form; otherwise set the time of the next probe."""
    if not _end_if_found(transition, "the members had not formed"):
        transition.run.deadline_s = form_deadline_s(transition)


def _end_if_found(transition: Transition, evidence: str) -> bool:
    if transition.run.network.found:
        transition.follow(AttemptFailed(FaultKind.UNDECIDED, (), evidence))
        return True
    return False


def answered_down(transition: Transition, _: SearchAnswered) -> None:
    """Read again without the nodes behind a lost link: their versions cannot be loaded."""
    run = transition.run
    if run.network.found:
        run.reads.bad_from = run.reads.num + 1
        run.reads.seen = False


def probe_due_links(transition: Transition) -> None:
    """Probe the links that are due, and wake up for later ones."""
    run = transition.run
    known, pairs = links.due(run.network.links, transition.now_s)
    if pairs:
        number = run.network.num_probes + 1
        run.network = run.network._replace(links=known, num_probes=number)
        transition.actions.append(ProbeLinks(number=number, pairs=pairs))
    transition.wake_by(links.wake_s(known, transition.now_s))
    transition.follow(LinksDue())
