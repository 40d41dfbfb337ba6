"""When gradients are reduced after every pass, and when once a step."""

from typing import Any

import pytest
from torch import nn

from ucp_core.layout import ParallelLayout
from workers.settings import RunSettings, Settings, TrainSettings, problems
from workers.train.executor import GradientSums

#: 1 GiB of gradients.
LARGE = {"weight": (1 << 14, 1 << 14)}


def sums(
    layout: ParallelLayout, room: tuple[float, float] = (2.0, 1.0), **how: Any
) -> GradientSums:
    """Return the sums of rank 0 for 8 micro-batches, with so much memory and such a peak."""
    shapes = how.pop("shapes", LARGE)
    train = TrainSettings(global_batch=8, micro_batch=1, **how)
    return GradientSums(train, nn.Module(), shapes, layout, 0, round_of=1, room=lambda: room)


def reduced(found: GradientSums) -> list[int]:
    """Return after which passes the next step reduces."""
    return [number for number, one in enumerate(found.quota.passes) if one.syncs]


def test_large_gradients_are_reduced_often_until_all_ranks_have_room() -> None:
    """A rank that has room may have peers without, and all must do the same."""
    for is_short in (False, True):
        found = sums(ParallelLayout(dp_shard=2))
        assert reduced(found) == [0, 1, 2, 3]
        assert not found.lacks_room()
        found.agree(lacks_room=is_short)
        assert reduced(found) == ([0, 1, 2, 3] if is_short else [3])
        # Nothing is measured in later steps.
        assert not found.lacks_room()
    assert sums(ParallelLayout(dp_shard=2), room=(1.0, 2.0)).lacks_room()


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (ParallelLayout(dp_shard=2), {"shapes": {"weight": (1 << 10, 1 << 10)}}),
        (ParallelLayout(dp_shard=2, tp=8), {}),
        (ParallelLayout(dp_replicate=2), {}),
        (ParallelLayout(dp_shard=2), {"reduce_gradients": "once"}),
    ],
)
def test_other_gradients_are_reduced_once(layout: ParallelLayout, how: dict[str, Any]) -> None:
    """Small ones cost little memory, those of a rank alone none, and then nothing is measured."""
    found = sums(layout, room=(1.0, 2.0), **how)
    num = len(found.quota.passes)
    assert reduced(found) == [num - 1]
    assert not found.lacks_room()


def test_what_is_configured_is_done_and_what_has_no_effect_is_refused() -> None:
    """The tree of sums has an order of its own."""
    small = {"weight": (2, 2)}
    often = sums(ParallelLayout(dp_shard=4), shapes=small, reduce_gradients="every_pass")
    assert reduced(often) == [0, 1]
    often.agree(lacks_room=False)
    assert reduced(often) == [0, 1]
    tree = sums(ParallelLayout(dp_shard=4), deterministic=True)
    assert reduced(tree) == [1]
    train = TrainSettings(deterministic=True, reduce_gradients="every_pass")
    (problem,) = problems(Settings(run=RunSettings(directory="run"), train=train))
    assert problem.startswith("train.reduce_gradients: every_pass changes nothing")
