from orchestrator.policies import LayoutRules, choose, usable
from ucp_core.layout import ParallelLayout


def test_every_number_of_workers_is_used_without_fixed_axes() -> None:
    """Uneven quotas make every degree legal; a divisibility rule would idle healthy GPUs."""
    for num_workers in range(1, 65):
        assert choose(num_workers, LayoutRules()) == ParallelLayout(dp_shard=num_workers)


def test_replicas_leave_out_what_does_not_fill_them() -> None:
    """The fixed axis decides how many are left over."""
    assert choose(7, LayoutRules(dp_replicate=2)) == ParallelLayout(dp_replicate=2, dp_shard=3)


def test_a_tensor_parallel_group_is_whole_or_not_there() -> None:
    """Half of it has half of every matrix, which trains nothing."""
    assert choose(7, LayoutRules(tp=2)) == ParallelLayout(dp_shard=3, tp=2)
    assert choose(3, LayoutRules(tp=4)) is None


def test_too_few_workers_have_no_layout() -> None:
    """Half a replica cannot train; the run has to wait and not to crash."""
    assert choose(1, LayoutRules(dp_replicate=2)) is None
    assert choose(0, LayoutRules()) is None


def test_usable_agrees_with_the_choice() -> None:
    """The machine counts with one and builds with the other."""
    for dp_replicate, tp in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        rules = LayoutRules(dp_replicate=dp_replicate, tp=tp)
        for num_workers in range(12):
            layout = choose(num_workers, rules)
            expected = layout.world_size if layout else 0
            assert usable(num_workers, rules) == expected
