"""Groups and claims of tolerance against brute force over partitions and losses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.snapshot.groups import (
    Groups,
    adjust_groups,
    form_groups,
    partners,
    shared_domains,
)
from workers.snapshot.placement import (
    Node,
    Placement,
    PlacementRules,
    holdings,
    level,
    place,
    survives,
)

RACKS = st.lists(st.integers(0, 4), min_size=1, max_size=8)


def _domains(racks: list[int]) -> dict[str, str]:
    return {f"n{index}": f"r{rack}" for index, rack in enumerate(racks)}


def _partitions(nodes: list[str]) -> Iterator[list[list[str]]]:
    """Yield every way to cut nodes into groups."""
    if not nodes:
        yield []
        return
    first, *rest = nodes
    for parts in _partitions(rest):
        yield [[first], *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], [first, *part], *parts[index + 1 :]]


def _apart(groups: list[list[str]], domains: dict[str, str]) -> bool:
    return all(len({domains[node] for node in group}) == len(group) for group in groups)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(1, 3), st.integers(3, 8))
def test_members_share_a_domain_only_if_every_partition_does(
    racks: list[int], size_min: int, size_max: int
) -> None:
    """One rack with half of the nodes is usual in small clusters; more is not solvable."""
    domains = _domains(racks)
    groups = form_groups(domains, size_min=size_min, size_max=size_max)

    assert sorted(node for group in groups for node in group) == sorted(domains)
    sizes = [len(group) for group in groups]
    assert min(sizes) >= min(size_min, len(domains))
    assert max(sizes) - min(sizes) <= 1
    possible = any(
        _apart(parts, domains) and min(map(len, parts)) >= size_min
        for parts in _partitions(sorted(domains))
    )
    if possible:
        assert shared_domains(groups, domains) == ()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 4)), max_size=25),
    st.integers(1, 3),
)
def test_groups_stay_as_good_as_new_over_any_changes(
    changes: list[tuple[bool, int, int]], size_min: int
) -> None:
    """Small repairs add up: after a day of them every group could hold one rack twice."""
    domains = _domains([0, 1, 2, 3])
    groups: Groups = form_groups(domains, size_min=size_min, size_max=5)
    for number, (joins, pick, rack) in enumerate(changes):
        if joins:
            domains[f"j{number}"] = f"r{rack}"
        elif domains:
            del domains[sorted(domains)[pick % len(domains)]]
        groups = adjust_groups(groups, domains, size_min=size_min, size_max=5)
        anew = form_groups(domains, size_min=size_min, size_max=5)

        assert sorted(node for group in groups for node in group) == sorted(domains)
        assert len(shared_domains(groups, domains)) <= len(shared_domains(anew, domains))
        if domains:
            assert min(map(len, groups)) >= min(size_min, len(domains))
            assert max(map(len, groups)) <= max(5, *map(len, anew))


@settings(deadline=None, max_examples=100)
@given(st.integers(4, 40), st.integers(1, 3), st.integers(0, 100))
def test_one_node_that_leaves_or_joins_changes_one_group(
    num_nodes: int, size_min: int, pick: int
) -> None:
    """Every changed group computes its redundancy anew, and is less protected until it has."""
    domains = {f"n{index:02}": f"n{index:02}" for index in range(num_nodes)}
    limits = {"size_min": size_min, "size_max": 8}
    groups = form_groups(domains, **limits)
    gone = sorted(domains)[pick % num_nodes]
    (left,) = [group for group in groups if gone in group]
    del domains[gone]
    after = adjust_groups(groups, domains, **limits)
    if len(left) > size_min:
        assert set(groups) - set(after) == {left}

    domains["late"] = "late"
    joined = adjust_groups(after, domains, **limits)
    assert len(set(after) - set(joined)) == 1


@given(RACKS, st.integers(0, 3))
def test_copies_are_on_other_nodes_and_in_as_many_domains_as_there_are(
    racks: list[int], copies: int
) -> None:
    """A node that copies itself protects nothing, and two copies in one rack go together."""
    domains = _domains(racks)
    keepers = partners((tuple(domains),), domains, copies)

    wanted = min(copies, len(domains) - 1)
    for node, kept_by in keepers.items():
        assert len({node, *kept_by}) == 1 + len(kept_by) == 1 + wanted
        holders = {domains[each] for each in (node, *kept_by)}
        assert len(holders) == min(1 + wanted, len(set(domains.values())))
    if len(set(racks)) == len(racks):
        num_kept = [sum(node in kept_by for kept_by in keepers.values()) for node in domains]
        assert set(num_kept) == {wanted}


RANK_BYTES = st.integers(1, 1000)


def _readable(placement: Placement, lost: set[str]) -> bool:
    """Return whether all can be read, from the list of what is held and nothing else."""
    kept = holdings(placement)
    for group in placement.groups:
        own = [one for one in kept if one.node in group]
        for at, node in enumerate(group):
            if placement.tolerance and own[0].parity is not None:
                stripe = [one for one in own if one.stripe == at]
                members = set(stripe[0].of)
                alive = sum(one.node not in lost for one in stripe)
                if len(members & lost) > alive:
                    return False
            elif not {node, *(one.node for one in own if one.of == (node,))} - lost:
                return False
    return True


def _check_claims(placement: Placement, nodes: list[Node]) -> None:
    names = [node.name for node in nodes]
    claimed = level(placement)
    assert claimed >= placement.tolerance
    for count in range(min(claimed + 2, len(names) + 1)):
        outcomes = set()
        for lost in combinations(names, count):
            readable = _readable(placement, set(lost))
            assert survives(placement, lost) == readable, lost
            outcomes.add(readable)
        if count <= claimed:
            assert outcomes == {True}
    if claimed < len(names):
        # No less is claimed than is true, either.
        assert False in outcomes


@settings(deadline=None, max_examples=150)
@given(
    RACKS,
    RANK_BYTES,
    st.integers(0, 2),
    st.integers(3, 8),
    st.lists(st.integers(0, 9000), min_size=8),
)
def test_every_claimed_tolerance_is_true_and_none_is_too_small(
    racks: list[int], rank_bytes: int, tolerance: int, group_max: int, headroom: list[int]
) -> None:
    """Over all sizes, mechanisms, group sizes and every set of lost nodes."""
    nodes = [
        Node(name=name, rack=rack, num_ranks=1 + index % 2, headroom_bytes=headroom[index])
        for index, (name, rack) in enumerate(_domains(racks).items())
    ]
    rules = PlacementRules(tolerance=tolerance, group_max=group_max, num_slots=1)
    placement = place(nodes, rank_bytes, rules)
    _check_claims(placement, nodes)

    if not placement.shared_racks:
        racks_named = sorted({node.rack for node in nodes})
        for lost in combinations(racks_named, placement.tolerance):
            assert survives(placement, [node.name for node in nodes if node.rack in lost])


@settings(deadline=None, max_examples=60)
@given(RANK_BYTES, st.integers(1, 2), st.lists(st.booleans(), min_size=1, max_size=6))
def test_claims_stay_true_while_nodes_come_and_go(
    rank_bytes: int, tolerance: int, changes: list[bool]
) -> None:
    """Groups that grew or lost a member are not those that were formed."""
    nodes = [Node(name=f"n{index}", headroom_bytes=4000) for index in range(5)]
    rules = PlacementRules(tolerance=tolerance, group_max=4, num_slots=1)
    placement = place(nodes, rank_bytes, rules)
    for number, joins in enumerate(changes):
        if joins:
            nodes = [*nodes, Node(name=f"j{number}", headroom_bytes=4000)]
        elif len(nodes) > 1:
            nodes = nodes[1:]
        fresh = place(nodes, rank_bytes, rules)
        placement = place(nodes, rank_bytes, rules, placement)
        _check_claims(placement, nodes)
        assert level(placement) >= fresh.tolerance
