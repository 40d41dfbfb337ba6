"""Decide which nodes may train together if some pairs do not reach each other.

Pure. Keepers probe one another. If the way between two nodes fails, their link is lost. A link that
is whole again must stay so for a pause before it is used. The pause doubles each time the link is
lost in use, so an unstable link is not used until it is stable.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeAlias

from orchestrator.core.state import CONTROLLER, Link, Pair

#: A link that was whole for this many seconds is forgotten: it counts like any other.
_FORGET_S = 3600.0
#: A lost link is probed again after this share of the time since it was lost, within these limits.
_SHARE = 0.1
_PROBE_S_MIN = 2.0
_PROBE_S_MAX = 60.0
#: A link is probed this many times during its pause.
_LOOKS = 8
#: Up to this many nodes, all choices are compared. Beyond, the worst node is excluded until the
#: rest reach each other. 16 nodes in a ring of lost links take about 1 ms.
_EXACT_MAX = 16


#: By node: the nodes that it must not train with; its workers, and whether it is preferred.
_Foes: TypeAlias = Mapping[str, set[str]]
_Worth: TypeAlias = Mapping[str, tuple[int, bool]]


def noted(
    links: Sequence[Link],
    *,
    lost: Collection[Pair],
    heard: Collection[str],
    asked: Collection[Pair],
    now_s: float,
) -> tuple[Link, ...]:
    """Return the links after an answer to a probe.

    Args:
        lost: The ways that have no connection.
        heard: Nodes whose keepers answered. A missing answer proves nothing.
        asked: Ends of the known links that were probed. Links in ``lost`` were probed as well.
    """
    ways: dict[Pair, list[Pair]] = {}
    for way in sorted(lost):
        ways.setdefault(_ends(way), []).append(way)
    after: list[Link] = []
    for link in links:
        found = tuple(ways.pop(link.ends, ()))
        is_told = bool(found) or (link.ends in asked and set(link.ends) <= set(heard))
        link = _told(link, found, now_s) if is_told else link  # noqa: PLW2901
        told_s = link.since_s if CONTROLLER in link.ends and link.lost else link.whole_s
        if now_s - told_s < _FORGET_S:
            after.append(link)
    after += [
        _again(Link(ends=ends, lost=tuple(found), since_s=now_s), now_s)
        for ends, found in ways.items()
    ]
    return tuple(after)


def _told(link: Link, found: tuple[Pair, ...], now_s: float) -> Link:
    if found and now_s >= link.until_s:
        link = link._replace(since_s=now_s, num_lost=link.num_lost + 1)
    whole_s = inf if found else min(link.whole_s, now_s)
    return _again(link._replace(lost=found, whole_s=whole_s), now_s)


def _again(link: Link, now_s: float) -> Link:
    """Return the link with the time of its next probe; infinity once its pause is over."""
    if now_s >= link.until_s or CONTROLLER in link.ends:
        return link._replace(probe_s=inf)
    period_s = link.pause_s / _LOOKS if not link.lost else _SHARE * (now_s - link.since_s)
    return link._replace(probe_s=now_s + min(max(period_s, _PROBE_S_MIN), _PROBE_S_MAX))


def due(links: Sequence[Link], now_s: float) -> tuple[tuple[Link, ...], tuple[Pair, ...]]:
    """Return the links with their next probe times, and the ends of those to probe now."""
    late = tuple(link.ends for link in links if link.probe_s <= now_s)
    return tuple(_again(link, now_s) if link.probe_s <= now_s else link for link in links), late


def wake_s(links: Sequence[Link], now_s: float) -> float:
    """Return when a link must be probed or may be used again; infinity if never."""
    times_s = [t for link in links for t in (link.probe_s, link.until_s) if t > now_s]
    return min(times_s, default=inf)


def without(links: Sequence[Link], node: str) -> tuple[Link, ...]:
    """Return the links without those between ``node``, which is gone, and other nodes."""
    return tuple(link for link in links if node not in link.ends or CONTROLLER in link.ends)


def apart(links: Sequence[Link], now_s: float, *, paused: bool = True) -> tuple[Pair, ...]:
    """Return the pairs that must not train together, each with sorted ends.

    ``paused`` includes links that are whole again but still in their pause.
    """
    return tuple(link.ends for link in links if link.lost or (paused and now_s < link.until_s))


def left_out(
    weights: Mapping[str, int], pairs: Iterable[Pair], *, preferred: Collection[str] = ()
) -> frozenset[str]:
    """Return the nodes to do without, so that all others reach each other.

    The nodes that stay have the most workers together; among equals, the most ``preferred`` ones,
    then the first by name. ``weights`` are the workers by node. Pairs with a node that it does not
    list do not count, and nodes in no pair always stay.
    """
    weights = {**weights, CONTROLLER: sum(weights.values()) + 1}
    foes = _foes(pair for pair in pairs if all(weights.get(end) for end in pair))
    worth = {node: (weights[node], node in preferred) for node in foes}
    out: set[str] = set()
    for part in _parts(foes):
        choose = _best if len(part) <= _EXACT_MAX else _greedy
        out |= part - choose({node: foes[node] for node in part}, worth)
    return frozenset(out)


def choices(pairs: Iterable[Pair]) -> list[frozenset[str]]:
    """Return the sets of nodes in ``pairs`` that reach each other, the largest first."""
    foes = _foes(pairs)
    if len(foes) > _EXACT_MAX:
        return [_greedy(foes, dict.fromkeys(foes, (1, False)))]
    return sorted(set(_groups(foes)), key=lambda nodes: (-len(nodes), sorted(nodes)))


def _foes(pairs: Iterable[Pair]) -> dict[str, set[str]]:
    foes: dict[str, set[str]] = {}
    for one, other in pairs:
        foes.setdefault(one, set()).add(other)
        foes.setdefault(other, set()).add(one)
    return foes


def _parts(foes: _Foes) -> list[frozenset[str]]:
    """Return the connected parts of the graph; the choice in one does not affect the others."""
    parts: list[frozenset[str]] = []
    left = set(foes)
    while left:
        part, edge = set[str](), {min(left)}
        while edge:
            part |= edge
            edge = {foe for node in edge for foe in foes[node]} - part
        left -= part
        parts.append(frozenset(part))
    return parts


def _best(foes: _Foes, worth: _Worth) -> frozenset[str]:
    return min(_groups(foes), key=lambda nodes: _rank(nodes, worth))


def _groups(foes: _Foes) -> Iterator[frozenset[str]]:
    """Yield sets without foes, all maximal ones among them: with the worst node, or without."""
    if not any(foes.values()):
        yield frozenset(foes)
        return
    worst = max(foes, key=lambda node: (len(foes[node]), node))
    yield from _groups(_but(foes, {worst}))
    for nodes in _groups(_but(foes, {worst, *foes[worst]})):
        yield nodes | {worst}


def _greedy(foes: _Foes, worth: _Worth) -> frozenset[str]:
    """Return a good set without foes: repeatedly drop the node with the least cost per foe."""
    while any(foes.values()):
        costly = [node for node in foes if foes[node]]
        # Among equals, the last by name.
        cost = {node: (worth[node][0] / len(foes[node]), worth[node][1]) for node in costly}
        least = min(cost.values())
        foes = _but(foes, {max(node for node in costly if cost[node] == least)})
    return frozenset(foes)


def _rank(nodes: frozenset[str], worth: _Worth) -> tuple[int, int, list[str]]:
    return (
        -sum(worth[node][0] for node in nodes),
        -sum(worth[node][1] for node in nodes),
        sorted(nodes),
    )


def _but(foes: _Foes, out: set[str]) -> dict[str, set[str]]:
    return {node: those - out for node, those in foes.items() if node not in out}


def described(lost: Collection[Pair]) -> str:
    """Return as text which link is lost, or which node if all lost links end there."""
    links = sorted({_ends(way) for way in lost})
    common = sorted(set.intersection(*map(set, links))) if links else []
    if len(links) > 1 and common:
        return f"node {common[0][:8]} has no connection with {len(links)} others"
    words: list[str] = []
    for one, other in links[:4]:
        both = {(one, other), (other, one)} <= set(lost)
        source, target = (one, other) if both or (one, other) in lost else (other, one)
        way = "between nodes {} and {}" if both else "from node {} to node {}"
        words.append("no connection " + way.format(source[:8], target[:8]))
    more = f" and {len(links) - 4} more" if len(links) > 4 else ""  # noqa: PLR2004
    return ", ".join(words) + more


def _ends(way: Pair) -> Pair:
    return way if way[0] < way[1] else (way[1], way[0])
