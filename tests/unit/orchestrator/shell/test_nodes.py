from __future__ import annotations

import pytest

from orchestrator.shell.nodes import view_of

ROW = {
    "NodeID": "a1b2",
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerPort": 4711,
    "Labels": {"ray.io/node-id": "a1b2", "rack": "r7"},
}


@pytest.mark.parametrize(("label", "rack"), [("rack", "r7"), ("zone", ""), ("", "")])
def test_a_label_says_what_a_node_fails_together_with(label: str, rack: str) -> None:
    """A cluster of which only some nodes are labelled is common; those without fail alone."""
    view = view_of(ROW, label)

    assert (view.rack, view.raylet_address) == (rack, ("10.0.0.7", 4711))
