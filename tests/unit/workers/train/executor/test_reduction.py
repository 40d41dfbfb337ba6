import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.train.executor.quotas import quota
from workers.train.executor.reduction import SumTree, use_deterministic_kernels


def leaves(num_leaves: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_leaves)
    return torch.randn(num_leaves, 64, generator=generator) * 1e3


def tree_sum(values: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Sum as the ranks would: siblings that meet on a rank first, then in order of arrival."""
    tree = SumTree()
    for reduction in quota(len(values), num_ranks, 0, fixed_tree=True).nodes:
        for node in reduction:
            if node is not None:
                level, index = node
                parts = values[index << level : (index + 1) << level]
                tree.add(node, parts[0].clone() if level == 0 else parts[0] + parts[1])
    return tree.take()


@given(st.integers(1, 40), st.integers(1, 12))
def test_the_sum_has_the_same_bits_for_every_number_of_ranks(
    num_leaves: int, num_ranks: int
) -> None:
    """Nodes arrive in another order, and as other nodes, for every number of ranks."""
    values = leaves(num_leaves)

    assert torch.equal(tree_sum(values, num_ranks), tree_sum(values, 1))


def test_a_sum_in_another_order_has_other_bits() -> None:
    """If it had not, the tree would be of no use and the test above could not fail."""
    values = leaves(16)

    assert not torch.equal(tree_sum(values, 1), values.sum(dim=0))


def test_a_negative_zero_comes_out_as_zero() -> None:
    """One leaf keeps it and two do not, so the bits would tell the number of reductions."""
    tree = SumTree()
    tree.add((0, 0), torch.tensor([-0.0]))

    assert not torch.signbit(tree.take()).any()


def test_a_gpu_is_set_to_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels add in the order in which blocks of threads happen to end."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        use_deterministic_kernels()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(mode=False)
