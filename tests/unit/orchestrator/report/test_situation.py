"""One sentence on what a run does or waits for."""

from typing import Any

import pytest

from orchestrator.core import RunState, describe
from orchestrator.report import what_it_does, what_survives


def _worker(state: str) -> dict[str, Any]:
    return {"worker": "w1", "node": "n", "state": state}


@pytest.mark.parametrize(
    ("losses", "mechanism", "said", "is_well"),
    [
        (0, "partner copy", "would not survive a node loss", False),
        (0, "no redundancy", "would not survive a node loss", False),
        (1, "partner copy", "survives the loss of 1 node (partner copy)", True),
        (2, "", "survives the loss of 2 nodes", True),
        (
            1,
            "no redundancy",
            "survives the loss of 1 node by older copies, but new steps are not copied",
            False,
        ),
    ],
)
def test_what_a_lost_node_would_leave_is_one_sentence_for_all_views(
    losses: int, mechanism: str, said: str, *, is_well: bool
) -> None:
    """Right after a drain the page said in green that a loss is survived, by no redundancy."""
    redundancy = {"node_losses_survived": losses, "mechanism": mechanism}

    assert what_survives(redundancy) == (said, is_well)


CAUSE = {"kind": "node_loss", "guilty": ["w0002"], "evidence": "node aeed: it hung up"}
LACKS = [{"asked": 4, "granted": 2, "why": "no room"}]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            {"phase": "training", "workers": [_worker("training")] * 2, "layout": "tp=2"},
            "Trains on 2 workers (tp=2).",
        ),
        (
            {"phase": "training", "workers": [_worker("training")], "capacity": LACKS},
            "Trains on 1 worker. Asks for 2 more places: no room.",
        ),
        (
            {
                "phase": "waiting",
                "standbys": [_worker("starting")] * 2,
                "nodes": [{"node": "aeed281d0000", "state": "lost"}],
            },
            "Waits for workers. Processes: 2 starting. Lost: node aeed281d.",
        ),
        (
            {
                "phase": "forming",
                "attempt": 3,
                "workers": [_worker("training"), _worker("forming")],
            },
            "Attempt 3 forms: 1 of 2 workers are ready.",
        ),
        (
            {"phase": "fencing", "attempt": 3, "cause": CAUSE},
            "Stops attempt 3. Cause: node loss of w0002: node aeed: it hung up.",
        ),
        ({"phase": "failed", "reason": "no workers"}, "Has failed: no workers."),
    ],
)
def test_every_phase_says_what_it_waits_for(status: dict[str, Any], said: str) -> None:
    """Only "waiting" was printed seven times, without a reason."""
    assert what_it_does({**describe(RunState()), "workers": [], **status}) == said
