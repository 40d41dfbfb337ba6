import itertools
from random import Random

import pytest

from orchestrator.core.network import links
from orchestrator.core.state import Link, Pair


def _cut(*pairs: Pair, at_s: float = 0.0) -> tuple[Link, ...]:
    ways = [way for one, other in pairs for way in ((one, other), (other, one))]
    return links.noted((), lost=ways, heard=(), asked=(), now_s=at_s)


def _heal(known: tuple[Link, ...], at_s: float) -> tuple[Link, ...]:
    ends = {link.ends for link in known}
    heard = {node for pair in ends for node in pair}
    return links.noted(known, lost=(), heard=heard, asked=ends, now_s=at_s)


def _lose(known: tuple[Link, ...], at_s: float) -> tuple[Link, ...]:
    lost = [link.ends for link in known]
    return links.noted(known, lost=lost, heard=(), asked=lost, now_s=at_s)


def test_one_cut_pair_costs_one_node_and_rather_a_new_one() -> None:
    """Members hold their state; and the choice must be the same in every replay."""
    weights = dict.fromkeys("abcd", 1)

    assert links.left_out(weights, [("b", "d")]) == {"d"}
    assert links.left_out(weights, [("b", "d")], preferred="acd") == {"b"}
    assert links.left_out({**weights, "d": 2}, [("b", "d")], preferred="abc") == {"b"}


def test_a_link_without_one_way_differs_from_one_without_both() -> None:
    """A firewall may stop one of them, and people look for it at its end."""
    assert links.described([("b", "a")]) == "no connection from node b to node a"
    assert links.described([("b", "a"), ("a", "b")]) == "no connection between nodes a and b"


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_group_is_found_by_trying_all(seed: int) -> None:
    """The search branches and bounds; all subsets of eight nodes are few enough to compare."""
    rng = Random(seed)
    weights = {node: rng.randint(1, 3) for node in "abcdefgh"}
    pairs = [p for p in itertools.combinations("abcdefgh", 2) if rng.random() < 0.3]

    def fits(nodes: tuple[str, ...]) -> bool:
        return not any({*pair} <= set(nodes) for pair in pairs)

    groups = (nodes for n in range(9) for nodes in itertools.combinations(sorted(weights), n))
    most = max(sum(weights[node] for node in nodes) for nodes in groups if fits(nodes))
    stays = tuple(sorted(set(weights) - links.left_out(weights, pairs)))

    assert fits(stays)
    assert sum(weights[node] for node in stays) == most


def test_a_thousand_nodes_are_chosen_from_as_fast_as_ten() -> None:
    """Beyond a few nodes no exact search ends: half of the nodes cannot reach the other half."""
    names = [f"n{number:04d}" for number in range(400)]
    pairs = [(one, other) for one in names[:150] for other in names[150:]]
    out = links.left_out(dict.fromkeys(names, 1), pairs)

    assert out == set(names[:150])


def test_a_healed_link_is_used_after_a_pause_that_grows_with_each_loss_in_use() -> None:
    """Each use of a link that flaps costs a recovery."""
    known, at_s, pauses_s = _cut(("a", "b")), 0.0, []
    for _ in range(12):
        known = _heal(known, at_s + 10.0)
        (link,) = known
        pauses_s.append(link.until_s - (at_s + 10.0))
        assert links.apart(known, link.until_s - 0.1) == (("a", "b"),)
        assert links.apart(known, link.until_s - 0.1, paused=False) == ()
        assert links.apart(known, link.until_s) == ()
        at_s = link.until_s + 1.0
        known = _lose(known, at_s)

    assert pauses_s[:4] == [5.0, 10.0, 20.0, 40.0]
    assert pauses_s[-1] == 600.0


def test_a_link_that_flaps_within_its_pause_is_never_used_and_pays_no_more_for_it() -> None:
    """Once it stops, the run is whole again after the pause that its uses have earned."""
    known = _lose(_heal(_cut(("a", "b")), 1.0), 10.0)
    for at_s in range(20, 600, 8):
        known = _heal(known, at_s)
        assert links.apart(known, at_s + 3.9) == (("a", "b"),)
        known = _lose(known, at_s + 4.0)
    (link,) = _heal(known, 1000.0)

    assert link.until_s == 1010.0


def test_a_lost_link_is_probed_at_once_and_then_ever_more_rarely() -> None:
    """Three minutes cut must be seen to be over within half a minute, a day need not."""
    known, at_s, probes_s = _cut(("a", "b")), 0.0, []
    while at_s < 7200.0:
        at_s = links.wake_s(known, at_s)
        known, pairs = links.due(known, at_s)
        assert pairs == (("a", "b"),)
        probes_s.append(at_s)

    gaps_s = {later: later - sooner for sooner, later in itertools.pairwise(probes_s)}
    assert probes_s[0] <= 2.0
    assert max(gap_s for later_s, gap_s in gaps_s.items() if later_s < 240.0) <= 25.0
    assert len(probes_s) < 160


def test_a_silent_node_heals_no_link() -> None:
    """Silence of a keeper says nothing about its network."""
    known = _cut(("a", "b"))
    half = links.noted(known, lost=(), heard=("a",), asked=(("a", "b"),), now_s=5.0)

    assert half[0].lost == known[0].lost
    assert links.without(half, "b") == ()
