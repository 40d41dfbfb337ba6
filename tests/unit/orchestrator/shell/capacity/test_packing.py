"""Where room is asked for when workers belong together."""

from collections import Counter

import pytest

from orchestrator.shell.capacity.packing import choose


@pytest.mark.parametrize(
    ("room", "group", "num_workers", "expected"),
    [
        pytest.param({"a": 4, "b": 4, "c": 4}, 4, 6, [2, 4], id="a whole group, then a part"),
        pytest.param({"a": 4, "b": 4}, 2, 6, [2, 4], id="groups go where room is left"),
        pytest.param({"a": 2, "b": 4}, 4, 4, [4], id="a node that has room for the group"),
        pytest.param({"a": 1, "b": 1}, 2, 3, [1, 1], id="no node has room for one: some on each"),
    ],
)
def test_groups_are_whole_where_nodes_have_room(
    room: dict[str, int], group: int, num_workers: int, expected: list[int]
) -> None:
    """Counts of workers on the nodes that have any."""
    left, begun = Counter(room), Counter[str]()
    for _ in range(num_workers):
        node = choose(left, begun, group)
        if node is not None:
            left[node] -= 1
            begun[node] += 1
    assert sorted(begun.values()) == expected


def test_a_begun_group_is_completed_before_another_begins() -> None:
    """A worker of it was lost; the emptier node would leave two parts of groups."""
    assert choose({"a": 1, "b": 8}, {"a": 3}, 4) == "a"
    assert choose({"a": 1, "b": 8}, {"a": 3}, 4, avoid=("a",)) == "b"
    assert choose({"a": 1, "b": 8}, {"a": 4}, 4) == "b"
