from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from workers.data import DataLoader, DataOrder
from workers.errors import DataError

DATA = list(range(10))


def order_of(sampler: Any, *, seed: int = 0, global_batch: int = 4) -> DataOrder:
    sampled = DataLoader(DATA, sampler=sampler).sampled
    assert sampled is not None
    length = len(sampled.begin(seed))
    return DataOrder(
        seed=seed, num_samples=len(DATA), global_batch=global_batch, epoch=(length, length),
        given=sampled.epoch,
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([1.0, 9.0, *[0.0] * 8], 6),
        lambda: SubsetRandomSampler([2, 4, 6, 8, 9]),
        lambda: RandomSampler(DATA),
        lambda: lambda epoch: [epoch % 10, 3, 5],
    ],
    ids=["weighted", "subset", "random", "function"],
)
def test_an_epoch_depends_on_seed_and_number_alone(make: Callable[[], Any]) -> None:
    """A worker that comes later asks for epoch 3 first, and torch's samplers draw as they go."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = order_of(make()), order_of(make()), order_of(make(), seed=1)
    length = first.epoch[0] if first.epoch else 0
    epochs = [first.samples(at * length, (at + 1) * length).tolist() for at in range(5)]
    torch.rand(5)

    assert again.samples(3 * length, 4 * length).tolist() == epochs[3]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    # A step may lie in two epochs.
    steps = np.concatenate([again.step(number) for number in range(1, 4)]).tolist()
    assert steps == [one for epoch in epochs for one in epoch][:12]
    if not callable(make()):
        assert other.samples(0, 5 * length).tolist() != [one for e in epochs for one in e]
    torch.set_rng_state(before)
    order_of(make()).step(1)
    assert torch.equal(torch.get_rng_state(), before), "the script's numbers go on"


def test_weights_decide_how_often_a_sample_comes() -> None:
    order = order_of(WeightedRandomSampler([1.0, 3.0, *[0.0] * 8], 8), global_batch=400)

    assert Counter(order.step(1).tolist())[1] == pytest.approx(300, abs=40)


def test_the_epoch_of_trainer_is_cut_from_that_of_a_sampler() -> None:
    order = order_of(range(7))
    cut = DataOrder(seed=0, num_samples=10, global_batch=4, epoch=(6, 8), given=order.given)

    assert [cut.step(number).tolist() for number in (1, 2, 3)] == [
        [0, 1, 2, 3], [4, 5, -1, -1], [0, 1, 2, 3],
    ]  # fmt: skip


def counted() -> Any:
    numbers = iter(range(100))
    return lambda _epoch: [next(numbers) % 10]


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (
            DistributedSampler(TensorDataset(torch.zeros(10)), 2, 0),
            "DistributedSampler gives a rank only its part",
        ),
        (BatchSampler(range(10), 2, drop_last=False), r"gives \[0, 1\], which is not an index"),
        (
            RandomSampler(DATA, generator=torch.Generator()),
            "a different order .* leave out its gener",
        ),
        (counted(), "a different order for the same epoch"),
        (range(11), "gives the index 10 in epoch 0, and the data has 10 samples"),
        ([], "gives no index in epoch 0"),
        (3, "sampler=3 gives no indices"),
        (lambda epoch: range(1 + epoch), "gives 2 indices in epoch 1 and 1 in others"),
    ],
    ids=["distributed", "batches", "generator", "cursor", "outside", "empty", "number", "length"],
)
def test_what_gives_no_order_is_refused_by_name(sampler: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        order_of(sampler).samples(0, 3)


def test_a_stream_takes_none() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(DATA)

    with pytest.raises(DataError, match="a stream has an order of its own"):
        DataLoader(Endless(), sampler=range(3))
