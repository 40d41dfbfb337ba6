"""The costs of saves in the status."""

import pytest

from orchestrator.core import RunState
from orchestrator.policies import CadenceRules
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.memory.save_costs import CadenceWatch
from tests.support.keeper_handles import ClusterTable, nodes_of, workers_of
from workers.protocol import Pace, SaveCosts
from workers.settings import CheckpointSettings, SnapshotSettings


def _watch() -> CadenceWatch:
    inbox = Inbox(at_s=lambda: 0.0, post=lambda _: None)
    return CadenceWatch(
        inbox,
        workers=workers_of(nodes_of(ClusterTable(), inbox.post), inbox.post),
        rules=CadenceRules(),
        snapshot=SnapshotSettings(every_steps=1),
        checkpoint=CheckpointSettings(every_steps=10),
    )


@pytest.mark.parametrize(("busy_s", "taken", "share"), [(5.0, 5, 0.01), (0.1, 1, 0.05)])
def test_snapshots_that_are_skipped_cost_nothing(busy_s: float, taken: int, share: float) -> None:
    """Over a slow link every fifth is taken, and status said five times what training pays."""
    watch = _watch()
    watch.show(
        SaveCosts(
            step_s=1.0,
            snapshot_stall_s=0.05,
            snapshot_busy_s=busy_s,
            checkpoint_stall_s=0.0,
            checkpoint_busy_s=0.1,
            pace=Pace(snapshot_steps=1, checkpoint_steps=10),
        )
    )
    document = watch.document(RunState())

    assert document["snapshot_taken_steps"] == taken
    assert document["cost_share"] == pytest.approx(share)
    assert [line.split(" of ")[0] for line in document["problems"]] == (
        ["saving stalls training for 5.0%"] if share > CadenceRules().cost_share_max else []
    )
    assert document["reason"] == "as configured"
