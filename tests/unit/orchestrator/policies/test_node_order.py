"""The order of nodes: around slow links, rack by rack, and no farther than need be."""

import time
from itertools import pairwise, permutations
from random import Random

import pytest

from orchestrator.policies import node_order


def _ring(names: list[str], racks: str, **more: object) -> str:
    nodes = [(name, 1) for name in names]
    found = node_order.chosen(nodes, racks=dict(zip(names, racks, strict=True)), **more)  # type: ignore[arg-type]
    return "".join(found)


@pytest.mark.parametrize(
    ("racks", "crossings"), [("ABAB", 2), ("ABABAB", 2), ("ABCABC", 3), ("AABB", 2), ("ABBA", 2)]
)
def test_a_rack_is_entered_once(racks: str, crossings: int) -> None:
    names = list("abcdef"[: len(racks)])
    rack_of = dict(zip(names, racks, strict=True))
    found = node_order.chosen([(name, 1) for name in names], racks=rack_of)

    assert sorted(found) == names
    assert node_order.cost([(name, 1) for name in found], racks=rack_of) == (0, crossings)


def test_an_order_that_is_good_stays() -> None:
    """Another one would move the state for nothing."""
    assert _ring(["a", "b", "c", "d"], "ABBA") == "abcd"
    assert _ring(["d", "a", "c", "b"], "AAAA") == "dacb"
    assert _ring(["b", "a"], "AB") == "ba"
    assert _ring(["a", "b", "c"], "AB ".replace(" ", "C")) == "abc"


def test_racks_that_are_together_need_no_search() -> None:
    """A large run asks only this of ten thousand nodes; the search must not know better."""
    drawn = Random(0)
    for _ in range(200):
        racks = [drawn.choice("ABC") for _ in range(drawn.randint(3, 10))]
        nodes = [(name, drawn.randint(1, 3)) for name in range(len(racks))]
        if node_order.is_by_rack(racks):
            found = node_order.chosen(nodes, racks=dict(enumerate(racks)))
            assert found == [name for name, _ in nodes], racks
    assert node_order.is_by_rack("AABBC")
    assert node_order.is_by_rack(["", "", ""])
    assert not node_order.is_by_rack("ABA")
    assert not node_order.is_by_rack(["A", "", "B"])


def test_nodes_whose_rack_is_not_known_cross_nothing() -> None:
    nodes = [(name, 1) for name in "abcd"]
    assert node_order.chosen(nodes, racks={"a": "A", "c": "A"}) == ["a", "b", "c", "d"]


def test_the_ends_of_a_slow_link_are_no_neighbours() -> None:
    """Some collectives send to the next rank, some to the one before."""
    for slow in (("b", "a"), ("a", "d")):
        for racks in ("AAAA", "AABB"):
            found = _ring(["a", "b", "c", "d"], racks, slow={slow})
            ring = [*pairwise([*found, found[0]])]
            assert slow not in ring
            assert (slow[1], slow[0]) not in ring
    for slow in (("b", "a"), ("a", "b")):
        assert _ring(["a", "b", "c"], "AAA", slow={slow}) == "abc", "three are all neighbours"


def test_as_much_as_possible_stays_where_it_is() -> None:
    names = list("abcdef")
    held = {name: (at / 6, (at + 1) / 6) for at, name in enumerate(names)}
    found = _ring(names, "AAABAB", held=held)

    assert sum(one == other for one, other in zip(found, names, strict=True)) == 4, found


def test_ranks_of_a_node_stay_together_and_count() -> None:
    nodes = [("a", 2), ("b", 1), ("c", 2), ("d", 1)]
    racks = {"a": "A", "b": "B", "c": "A", "d": "B"}
    held = {"a": (0.0, 2 / 6), "b": (2 / 6, 3 / 6), "c": (3 / 6, 5 / 6), "d": (5 / 6, 1.0)}

    assert node_order.chosen(nodes, racks=racks, held=held) == ["a", "b", "d", "c"]


def test_exact_is_the_best_of_all_and_greedy_is_near() -> None:
    random = Random(3)
    for _ in range(30):
        names = list("abcde")
        racks = {name: random.choice("ABC") for name in names}
        slow = {tuple(random.sample(names, 2)) for _ in range(2)}
        nodes = [(name, 1) for name in names]
        best = min(
            node_order.cost([(n, 1) for n in way], racks=racks, slow=slow)  # type: ignore[arg-type]
            for way in permutations(names)
        )
        found = node_order.chosen(nodes, racks=racks, slow=slow)  # type: ignore[arg-type]
        assert node_order.cost([(n, 1) for n in found], racks=racks, slow=slow) == best  # type: ignore[arg-type]
    many = [(f"n{number}", 1) for number in range(300)]
    racks = {name: str(at % 7) for at, (name, _) in enumerate(many)}
    begun_s = time.monotonic()
    found = node_order.chosen(many, racks=racks, slow={("n14", "n7")})
    assert node_order.cost([(n, 1) for n in found], racks=racks, slow={("n14", "n7")}) == (0, 7)
    assert time.monotonic() - begun_s < 5.0
