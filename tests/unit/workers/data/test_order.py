import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.data import DataOrder


@given(st.integers(0, 2**70), st.integers(1, 3000), st.integers(0, 5))
def test_every_epoch_shows_every_sample_once(seed: int, num_samples: int, epoch: int) -> None:
    """The walk has to land inside for sizes that are no power of four, and for one sample."""
    order = DataOrder(seed=seed, num_samples=num_samples, global_batch=1)

    samples = order.samples(epoch * num_samples, (epoch + 1) * num_samples)

    assert np.array_equal(np.sort(samples), np.arange(num_samples))


@given(st.integers(1, 50), st.integers(1, 120), st.integers(1, 9))
def test_steps_are_the_order_cut_into_global_batches(
    num_samples: int, global_batch: int, step: int
) -> None:
    """A step may straddle epochs, or be longer than several of them."""
    order = DataOrder(seed=3, num_samples=num_samples, global_batch=global_batch)
    whole = order.samples(0, step * global_batch)

    assert np.array_equal(order.step(step), whole[(step - 1) * global_batch :])


def test_epochs_and_seeds_differ() -> None:
    """A key that ignored one of them would still give permutations."""
    first = DataOrder(seed=1, num_samples=1000, global_batch=1000)
    second = DataOrder(seed=2, num_samples=1000, global_batch=1000)

    orders = {tuple(first.step(1)), tuple(first.step(2)), tuple(second.step(1))}

    assert len(orders) == 3


def test_the_order_is_not_close_to_sorted() -> None:
    """A weak mixing would show neighbours together; a random order has a mean gap of n / 3."""
    samples = DataOrder(seed=0, num_samples=10_000, global_batch=10_000).step(1)

    assert 3100 < np.abs(np.diff(samples)).mean() < 3560


def test_the_order_is_for_ever() -> None:
    """Checkpoints name positions: another order under the same seed would show samples twice."""
    order = DataOrder(seed=7, num_samples=1000, global_batch=8)

    assert order.step(3).tolist() == [421, 467, 521, 684, 906, 593, 109, 822]


def test_an_epoch_may_end_with_positions_that_have_no_sample() -> None:
    """Each epoch takes as many samples as are to be taken, of all that there are."""
    order = DataOrder(seed=1, num_samples=13, global_batch=6, epoch=(12, 18))
    epochs = order.samples(0, 54).reshape(3, 18)

    for epoch in epochs:
        assert len(set(epoch[:12].tolist())) == 12
        assert epoch[12:].tolist() == [-1] * 6
    assert set(epochs[:, :12].ravel().tolist()) == set(range(13))
    whole = DataOrder(seed=1, num_samples=13, global_batch=6, epoch=(13, 18))
    plain = DataOrder(seed=1, num_samples=13, global_batch=6)
    assert whole.samples(18, 31).tolist() == plain.samples(13, 26).tolist()
