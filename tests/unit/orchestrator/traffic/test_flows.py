"""The bytes that a step sends, from records at two times."""

from dataclasses import replace

from orchestrator.traffic import Flow, Sent, measured, step_flows
from tests.support.histories import group
from ucp_core.layout import ParallelLayout


def _sent(step: int, **num_bytes: int) -> Sent:
    """Return the groups of a rank that has sent so much in each."""
    groups = [
        replace(group(name.replace("_of_", "["), range(2), step), sent_bytes=sent)
        for name, sent in num_bytes.items()
    ]
    return Sent(step, groups)


def test_the_bytes_of_a_step_are_reported_by_axis() -> None:
    """Pairs of stages are groups of their own, and a last stage sends nothing on."""
    first = (_sent(10, world=50, dp_shard_of_0=1000, pp_of_0=0), _sent(20, world=99,
             dp_shard_of_0=2000, pp_of_0=400, pp_of_1=200))  # fmt: skip
    last = (_sent(11, dp_shard_of_2=0), _sent(21, dp_shard_of_2=1046))

    assert measured([first, last]) == {"pp": 30.0, "dp_shard": 100.0}


def test_what_experts_send_has_axes_of_its_own() -> None:
    """Tokens go through groups ``ep``; weights of experts through those of ranks with the same."""
    sent = {"ep_2_of_0": 30, "efsdp+cp_2_of_0": 20, "efsdp_2_of_0": 1, "dp_replicate_2_of_0": 10}
    before = _sent(1, **dict.fromkeys(sent, 0))

    assert measured([(before, _sent(2, **sent))]) == {
        "ep": 30.0, "efsdp": 21.0, "dp_replicate": 10.0,
    }  # fmt: skip


def test_a_rank_sends_tokens_to_each_other_one_with_experts() -> None:
    """Two nodes of two: neighbours have other experts, and ranks of both nodes have the same."""
    layout = ParallelLayout(dp_shard=4, ep=2)
    found = step_flows(layout, ["a", "a", "b", "b"], {"ep": 8.0, "efsdp": 4.0})

    assert found["ep"] == [], "inside of a node"
    assert sorted(found["efsdp"]) == [Flow("a", "b", 4.0)] * 2 + [Flow("b", "a", 4.0)] * 2
    apart = step_flows(layout, ["a", "b", "c", "d"], {"ep": 8.0})["ep"]
    assert {(one.source, one.target, one.num_bytes) for one in apart} == {
        ("a", "b", 8.0), ("b", "a", 8.0), ("c", "d", 8.0), ("d", "c", 8.0),
    }  # fmt: skip
    all_apart = replace(layout, ep=4)
    third = step_flows(all_apart, ["a", "b", "c", "d"], {"ep": 9.0})["ep"]
    assert [one.num_bytes for one in third] == [3.0] * 12
    # Without experts such axes are none.
    assert step_flows(ParallelLayout(dp_shard=4), ["a", "b", "c", "d"], {"ep": 9.0}) == {}


def test_a_rank_without_a_step_or_that_left_says_nothing() -> None:
    one = _sent(10, dp_shard_of_0=1000)

    assert measured([(one, one), (one, Sent(20, ()))]) == {}
