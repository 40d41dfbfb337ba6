"""Rates are max-min fair for any paths: no flow could have more unless a slower one had less."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.traffic import fill

CASES = st.integers(1, 6).flatmap(
    lambda num_links: st.tuples(
        st.lists(
            st.sampled_from([0.0, 1.0, 2.0, 3.0, 7.0, 10.0]), min_size=num_links, max_size=num_links
        ),
        st.lists(
            st.lists(st.integers(0, num_links - 1), unique=True, max_size=num_links), max_size=8
        ),
    )
)


@given(CASES)
def test_every_flow_has_a_full_link_on_which_none_is_faster(
    case: tuple[list[float], list[list[int]]],
) -> None:
    """This says exactly which rates are max-min fair (Bertsekas and Gallager, 6.5.2)."""
    capacities, paths = case
    rates = fill(paths, dict(enumerate(capacities)))

    used = {
        link: [rate for rate, path in zip(rates, paths, strict=True) if link in path]
        for link in range(len(capacities))
    }
    for link, its in used.items():
        assert sum(its) <= capacities[link] + 1e-9
    for rate, path in zip(rates, paths, strict=True):
        limits = [
            link
            for link in path
            if sum(used[link]) == pytest.approx(capacities[link]) and rate >= max(used[link]) - 1e-9
        ]
        assert limits or (not path and rate == inf)


@given(CASES)
def test_rates_are_those_of_filling_by_small_steps(
    case: tuple[list[float], list[list[int]]],
) -> None:
    """The brute force: everyone gets a grain more in turn, until their link has no more grains."""
    capacities, paths = case
    grain = 1 / 840  # Capacities are divided by 8 flows at most.
    left = {link: round(each / grain) for link, each in enumerate(capacities)}
    got = [0] * len(paths)
    growing = {number for number, path in enumerate(paths) if path}
    while growing:
        for number in sorted(growing):
            if any(
                left[link] < sum(link in paths[each] for each in growing) for link in paths[number]
            ):
                growing.discard(number)
                break
        else:
            for number in growing:
                got[number] += 1
                for link in paths[number]:
                    left[link] -= 1

    for number, rate in enumerate(fill(paths, dict(enumerate(capacities)))):
        if paths[number]:
            assert rate == pytest.approx(got[number] * grain, abs=0.02)
