from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import (
    LayoutRules,
    choose,
    expected_step_s,
    one_node,
    rooms_of,
    step_ratio,
)
from orchestrator.policies.layout import (
    WHOLE,
    Refused,
    candidates,
    num_workers,
    other_layouts,
    relative_step,
    spread,
)
from ucp_core.layout import ParallelLayout

TWO_AXES = LayoutRules(tp=2, pp=2)


def chosen(rooms: list[int], rules: LayoutRules, num_min: int = 1) -> str:
    return str(choose(rooms_of(rooms), sum(rooms), rules, num_min))


@pytest.mark.parametrize("num_workers", [1, 2, 5, 16])
def test_all_workers_shard_when_nothing_else_is_asked_for(num_workers: int) -> None:
    layout = choose(one_node(num_workers), num_workers, LayoutRules())
    assert layout == ParallelLayout(dp_shard=num_workers)


def test_degrees_stay_while_a_quarter_of_the_workers_is_idle_at_most() -> None:
    assert chosen([4, 4], LayoutRules(tp=4)) == "dp_shard=2 x tp=4"
    # 4 of 5 train; of 6 only two thirds would.
    assert chosen([5], LayoutRules(tp=4)) == "tp=4"
    assert chosen([6], LayoutRules(tp=4)) == "dp_shard=3 x tp=2"


def test_a_lost_node_leaves_tensor_parallelism_on_the_other_one() -> None:
    assert chosen([2, 2], TWO_AXES) == "pp=2 x tp=2"
    assert chosen([2], TWO_AXES) == "tp=2"
    assert chosen([1], TWO_AXES) == "1 worker"
    assert chosen([1], LayoutRules(pp=2)) == "1 worker"


def test_sequences_are_cut_into_fewer_parts_when_workers_leave() -> None:
    """Unlike tensor-parallel workers, those with parts of a sequence may be on several nodes."""
    rules = LayoutRules(cp=4)
    assert chosen([4, 4], rules) == "dp_shard=2 x cp=4"
    assert chosen([1, 1, 1, 1], rules) == "cp=4"
    assert chosen([2, 1], rules) == "dp_shard=3"
    assert chosen([2], rules) == "cp=2"
    assert chosen([3], replace(rules, cp=2, fixed=("cp",))) == "cp=2"
    step = relative_step(ParallelLayout(cp=4), replace(rules, num_micro_batches=8))
    assert step == relative_step(ParallelLayout(dp_shard=4), LayoutRules(num_micro_batches=8))


def test_too_little_memory_for_a_part_of_a_sequence_is_too_little_for_a_longer_one() -> None:
    refused = Refused(ParallelLayout(dp_shard=2, cp=2), "", "out of memory")
    assert refused.rules_out(ParallelLayout(cp=2))
    assert refused.rules_out(ParallelLayout(dp_shard=4))
    assert not refused.rules_out(ParallelLayout(cp=4))
    assert not refused.rules_out(ParallelLayout(dp_shard=4, cp=2))


def test_a_tensor_parallel_group_is_on_one_node() -> None:
    # Four workers, and only one pair of them on a node.
    assert chosen([2, 1, 1], LayoutRules(tp=2)) == "dp_shard=4"
    assert chosen([3, 2], LayoutRules(tp=2)) == "dp_shard=2 x tp=2"
    assert spread([3, 2, 1], ParallelLayout(dp_shard=2, tp=2)) == [2, 2, 0]


def test_workers_that_need_few_nodes_use_as_many_as_protect_each_other() -> None:
    """Two workers of four on two nodes came together on one, and snapshots had no second place."""
    two = ParallelLayout(dp_shard=2)
    assert spread([2, 2], two) == [2, 0]
    assert spread([2, 2], two, 2) == [1, 1]
    assert spread([2, 2, 2], two, 3) == [1, 1, 0]
    assert spread([8, 8], ParallelLayout(dp_shard=8), 2) == [7, 1]
    assert spread([4, 4, 1], ParallelLayout(dp_shard=2, tp=2), 2) == [2, 2, 0]
    assert spread([4, 4], ParallelLayout(tp=4), 2) == [4, 0]


def test_a_fixed_axis_keeps_its_degree() -> None:
    pinned = LayoutRules(tp=2, pp=2, fixed=("tp",))
    assert chosen([2, 1], pinned) == "tp=2"
    assert choose(rooms_of([1, 1, 1]), 3, pinned) is None
    assert pinned.multiple_min == 2


def test_fixed_expert_parallelism_takes_shards_in_multiples_of_it() -> None:
    pinned = LayoutRules(ep=4, tp=2, fixed=("ep",))
    assert chosen([8, 2], pinned) == "dp_shard=4 x tp=2 x ep=4"
    assert chosen([8, 4], pinned) == "dp_shard=12 x ep=4"
    assert chosen([3, 2], pinned) == "dp_shard=4 x ep=4"
    assert choose(rooms_of([3]), 3, pinned) is None
    assert pinned.multiple_min == 4
    refused = Refused(ParallelLayout(dp_shard=4, ep=4), "ep", "does not divide 6 experts")
    assert choose(one_node(8), 8, replace(pinned, refused=(refused,))) is None


def test_a_wish_that_is_below_the_least_number_gives_way() -> None:
    assert chosen([5], LayoutRules(tp=4), num_min=5) == "dp_shard=5"
    assert choose(one_node(5), 4, LayoutRules(tp=4), 5) is None


def test_experts_are_cut_in_the_most_ways_that_divide_the_shards() -> None:
    """As many workers train as without experts: their number alone decides the ways."""
    rules = LayoutRules(ep=4, tp=2)
    assert rules.multiple == 8
    assert chosen([8, 8], rules) == "dp_shard=8 x tp=2 x ep=4"
    assert chosen([8, 4], rules) == "dp_shard=6 x tp=2 x ep=2"
    assert chosen([6], rules) == "dp_shard=3 x tp=2"


def test_experts_are_cut_in_fewer_ways_if_the_model_cannot_have_more() -> None:
    refused = Refused(ParallelLayout(dp_shard=4, ep=4), "ep", "does not divide 6 experts")
    assert chosen([8], LayoutRules(ep=4, refused=(refused,))) == "dp_shard=8 x ep=2"


def test_fewer_shards_with_experts_follow_on_a_refusal_of_more_without() -> None:
    """Three workers waited for a fourth, though two of them had trained."""
    refused = Refused(ParallelLayout(dp_shard=3), WHOLE, "its first step raised")
    assert chosen([1, 2], LayoutRules(ep=2, refused=(refused,))) == "dp_shard=2 x ep=2"


def test_a_pipeline_is_filled() -> None:
    # No one of seven ranks would have two of the six micro-batches.
    rules = LayoutRules(pp=2, num_micro_batches=6)
    assert choose(one_node(14), 14, rules) == ParallelLayout(dp_shard=14)
    assert choose(one_node(10), 10, rules) == ParallelLayout(pp=2, dp_shard=5)


def test_people_read_why_no_other_layout_was_taken() -> None:
    layout = choose(rooms_of([2]), 4, TWO_AXES)
    assert layout is not None
    assert other_layouts(layout, rooms_of([2]), 4, TWO_AXES) == (
        ("pp=2 x tp=2", "needs 4 workers, and there are 2"),
        ("pp=2", "is further from the configured layout"),
    )
    scattered = rooms_of([2, 1, 1])
    layout = choose(scattered, 4, LayoutRules(tp=2))
    assert layout is not None
    assert other_layouts(layout, scattered, 4, LayoutRules(tp=2)) == (
        ("tp=2", "leaves 2 of 4 workers idle"),
    )
    nowhere = rooms_of([1, 1])
    layout = choose(nowhere, 2, LayoutRules(tp=2))
    assert layout is not None
    why = "needs 1 x 2 workers, each on one node"
    assert other_layouts(layout, nowhere, 2, LayoutRules(tp=2)) == (("tp=2", why),)


degrees = st.sampled_from([1, 2, 3, 4, 6, 8])
axes = st.sets(st.sampled_from(["dp_replicate", "cp", "tp", "pp", "ep"])).map(tuple)
rules_of = st.builds(
    LayoutRules,
    dp_replicate=degrees,
    cp=degrees,
    tp=degrees,
    pp=degrees,
    ep=degrees,
    fixed=axes,
    num_micro_batches=st.integers(0, 12),
)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 80), st.integers(1, 6), rules_of)
def test_a_layout_fits_its_nodes_and_what_was_asked_for(
    workers: list[int], num_max: int, num_min: int, rules: LayoutRules
) -> None:
    rooms = rooms_of(workers)
    assert num_workers(rooms) == sum(workers)
    layout = choose(rooms, num_max, rules, num_min)
    if layout is None:
        # One worker alone could train if nothing is pinned.
        assert rules.fixed or sum(workers) < num_min or num_max < num_min or not sum(workers)
        return
    assert num_min <= layout.world_size <= num_max
    for axis in ("dp_replicate", "cp", "tp", "pp"):
        degree, wish = getattr(layout, axis), getattr(rules, axis)
        assert wish % degree == 0
        assert degree == wish or axis not in rules.fixed
    assert layout.ep == gcd(rules.ep, layout.dp_shard)
    assert layout.ep == rules.ep or "ep" not in rules.fixed
    if layout.pp > 1 and rules.num_micro_batches:
        assert -(-rules.num_micro_batches // layout.dp) >= layout.pp
    for num_nodes in (1, 3):
        used = spread(workers, layout, num_nodes)
        assert sum(used) == layout.world_size
        assert all(
            num <= room and num % layout.tp == 0 for num, room in zip(used, workers, strict=True)
        )
    others = other_layouts(layout, rooms, num_max, rules, num_min)
    assert len(others) == min(2, len(candidates(rules)) - 1)


def test_a_thousand_gpus_leave_few_candidates() -> None:
    """The decision takes a look at each of them, however many nodes there are."""
    rules = LayoutRules(tp=8, pp=16, dp_replicate=4, num_micro_batches=512)
    rooms = rooms_of([8] * 120 + [7] * 5 + [3] * 3)
    layout = choose(rooms, 1024, rules)
    assert layout is not None
    assert layout.tp == 8
    assert len(candidates(rules)) == 4 * 5 * 3


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "expected"),
    [
        (ParallelLayout(dp_shard=5), 0, 1 / 5),
        # A rank that has two passes has them for five workers as for seven.
        (ParallelLayout(dp_shard=5), 8, 2),
        (ParallelLayout(dp_shard=7), 8, 2),
        (ParallelLayout(dp_shard=8), 8, 1),
        (ParallelLayout(tp=2, dp_shard=2), 8, 4 / 2),
        # Four passes, and one stage waits.
        (ParallelLayout(pp=2, dp_shard=2), 8, 5 / 2),
    ],
)
def test_a_step_takes_as_long_as_the_rank_with_the_most_to_do(
    layout: ParallelLayout, num_micro_batches: int, expected: float
) -> None:
    """In units of one micro-batch on one worker."""
    rules = LayoutRules(num_micro_batches=num_micro_batches)
    assert relative_step(layout, rules) == pytest.approx(expected)


#: Two stages, and one, were seen: 0.9 s for two pairs, 0.2 s for two workers.
SEEN = LayoutRules(
    pp=2, steps=((ParallelLayout(pp=2, dp_shard=2), 0.9), (ParallelLayout(dp_shard=2), 0.2))
)


def test_what_was_seen_to_be_faster_is_taken_where_the_wish_leaves_workers_idle() -> None:
    assert chosen([5], SEEN) == "dp_shard=5"
    # The user asked for it, and it uses all.
    assert chosen([4], SEEN) == "pp=2 x dp_shard=2"
    # A quarter of the workers would be idle at most, as without steps.
    assert chosen([3], SEEN) == "dp_shard=3"
    assert chosen([5], replace(SEEN, steps=())) == "pp=2 x dp_shard=2"


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_is_left_for_what_was_not_seen(number: int) -> None:
    """Estimates leave out the network, and memory."""
    assert chosen([5], replace(SEEN, steps=SEEN.steps[number : number + 1])) == "pp=2 x dp_shard=2"


def test_a_few_percent_are_no_reason_to_leave_the_wish() -> None:
    """Step times of one layout differ by as much."""
    alike = ((ParallelLayout(pp=2, dp_shard=2), 0.5), (ParallelLayout(dp_shard=5), 0.48))
    assert chosen([5], replace(SEEN, steps=alike)) == "pp=2 x dp_shard=2"
    faster = ((ParallelLayout(pp=2, dp_shard=2), 0.5), (ParallelLayout(dp_shard=5), 0.47))
    assert chosen([5], replace(SEEN, steps=faster)) == "dp_shard=5"


def test_people_read_which_step_times_were_seen() -> None:
    rules = replace(SEEN, pp=4)
    layout = choose(one_node(5), 5, rules)
    assert layout == ParallelLayout(pp=4)
    assert other_layouts(layout, one_node(5), 5, rules) == (
        ("pp=2 x dp_shard=2", "is further from the configured layout; a step took 0.9 s"),
        ("dp_shard=5", "is further from the configured layout; a step would take about 0.08 s"),
    )
    five = ParallelLayout(dp_shard=5)
    assert other_layouts(five, one_node(5), 5, SEEN) == (
        ("pp=2 x dp_shard=2", "is slower; a step took 0.9 s"),
    )


def test_a_step_is_scaled_from_the_nearest_layout_that_was_seen() -> None:
    """From the same degrees where they were, whatever the number of workers."""
    assert expected_step_s(ParallelLayout(dp_shard=8), SEEN) == pytest.approx(0.2 * 2 / 8)
    assert expected_step_s(ParallelLayout(pp=2, dp_shard=4), SEEN) == pytest.approx(0.9 / 2)
    assert expected_step_s(ParallelLayout(pp=4, dp_shard=2), SEEN) == pytest.approx(0.9 / 2)
    assert expected_step_s(ParallelLayout(pp=4), LayoutRules(pp=4)) == 0.0


def test_more_workers_are_weighed_by_work_and_other_layouts_by_what_was_seen() -> None:
    """Simulated nodes share processors: there more workers never make a step shorter."""
    two, pairs = ParallelLayout(dp_shard=2), ParallelLayout(pp=2, dp_shard=2)
    assert step_ratio(pairs, two, SEEN) == pytest.approx(1 / 2)
    assert step_ratio(two, pairs, SEEN) == pytest.approx(0.2 / 0.9)


def test_stages_wait_half_as_long_if_each_worker_has_two() -> None:
    rules = LayoutRules(stages_per_worker=2, num_micro_batches=8)
    assert relative_step(ParallelLayout(pp=2, dp_shard=2), rules) == pytest.approx(4.5 / 2)
