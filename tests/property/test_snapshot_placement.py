"""Groups and claims of tolerance against brute force over partitions and losses."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.policies import RedundancyFacts, plan_redundancy
from orchestrator.policies.saving.groups import form_groups, partners, shared_domains
from tests.support.placements import is_readable
from workers.settings import SnapshotSettings

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
    domains = _domains(racks)
    names = tuple(domains)
    ranks = tuple(name for index, name in enumerate(names) for _ in range(1 + index % 2))
    facts = RedundancyFacts(
        nodes=ranks,
        budgets_bytes=dict(zip(names, headroom, strict=False)),
        rank_bytes=rank_bytes,
        racks=domains,
        group_max=group_max,
        num_buffers=1,
    )
    rules = SnapshotSettings(tolerance=tolerance)
    plan = plan_redundancy(facts, rules)
    for count in range(plan.tolerance + 1):
        assert all(is_readable(plan, names, lost) for lost in combinations(names, count))
    # No less is claimed than is true, either.
    assert not all(
        is_readable(plan, names, lost) for lost in combinations(names, plan.tolerance + 1)
    )
    if not plan.shared_racks:
        racks_named = sorted(set(domains.values()))
        for lost in combinations(racks_named, plan.tolerance):
            gone = [name for name in names if domains[name] in lost]
            assert is_readable(plan, names, gone)


@given(RACKS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_keepers_that_are_nearer_protect_as_well(
    racks: list[int], copies: int, draw: random.Random
) -> None:
    """Each node keeps as much, its copies are in as many domains, and they meet no more."""
    domains = _domains(racks)
    groups = form_groups(domains, size_min=copies + 1, size_max=8)
    ways = {(one, other): float(draw.randrange(9)) for one in domains for other in domains}
    plain = partners(groups, domains, copies)
    found = partners(groups, domains, copies, lambda one, other: ways[one, other])

    def most_kept(keepers: dict[str, tuple[str, ...]]) -> int:
        counts = Counter(each for names in keepers.values() for each in names)
        return max(counts.values(), default=0)

    assert most_kept(found) <= most_kept(plain)
    for node, names in found.items():
        assert len({node, *names}) == 1 + len(plain[node])
        spread = {domains[each] for each in (node, *names)}
        assert len(spread) >= len({domains[each] for each in (node, *plain[node])})
