"""The bytes that a step sends, from records at two times."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.traffic import Sent, measured
from tests.support.histories import group


def _sent(step: int, **num_bytes: int) -> Sent:
    """Return the groups of a rank that has sent so much in each."""
    groups = [
        replace(group(name.replace("_of_", "["), range(2), step), sent_bytes=sent)
        for name, sent in num_bytes.items()
    ]
    return Sent(step, groups)


def test_what_a_rank_sends_in_a_step_is_told_by_axis() -> None:
    """Pairs of stages are groups of their own, and a last stage sends nothing on."""
    first = (_sent(10, world=50, dp_shard_of_0=1000, pp_of_0=0), _sent(20, world=99,
             dp_shard_of_0=2000, pp_of_0=400, pp_of_1=200))  # fmt: skip
    last = (_sent(11, dp_shard_of_2=0), _sent(21, dp_shard_of_2=1046))

    assert measured([first, last]) == {"pp": 30.0, "dp_shard": 100.0}


def test_who_made_no_step_or_has_left_says_nothing() -> None:
    one = _sent(10, dp_shard_of_0=1000)

    assert measured([(one, one), (one, Sent(20, ()))]) == {}
