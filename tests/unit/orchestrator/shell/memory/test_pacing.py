"""What saves cost, as the status and the metrics tell it, and what is chosen from that."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from orchestrator.core import RunStats
from orchestrator.policies import Redundancy
from orchestrator.shell import RunNames
from orchestrator.shell.capacity.workers import Crew
from orchestrator.shell.memory.pacing import Pacing
from orchestrator.shell.serve.metrics import RunMetrics
from workers.protocol import Pace, SaveCosts
from workers.settings import CheckpointSettings, SnapshotSettings

ALONE = Redundancy(num_nodes=1, group_nodes=1, tolerance=0, reprotect_s=10.0)


async def _false(_node: str) -> bool:
    return False


async def _nothing(_node: str, _worker: str) -> None:
    return None


def _pacing(registry: CollectorRegistry, snapshot: int | str, checkpoint: int | str) -> Pacing:
    crew = Crew(
        names=RunNames("test"),
        at_s=lambda: 0.0,
        post=lambda _: None,
        is_draining=lambda _: False,
        is_gone=_false,
        kill_on_node=_nothing,
        look_around=lambda: None,
        boot={},
    )
    return Pacing(
        crew=crew,
        stats=RunStats(),
        metrics=RunMetrics(registry),
        snapshot=SnapshotSettings(every_steps=snapshot),
        checkpoint=CheckpointSettings(every_steps=checkpoint),
    )


def _costs(pacing: Pacing, **measured: float) -> SaveCosts:
    document = pacing.document()
    pace = Pace(
        snapshot_steps=document["snapshot_steps"], checkpoint_steps=document["checkpoint_steps"]
    )
    return SaveCosts(step_s=1.0, pace=pace, **measured)


def test_snapshots_that_are_skipped_cost_nothing() -> None:
    """Over a slow link every fifth is taken, and status said five times what training pays."""
    registry = CollectorRegistry()
    pacing = _pacing(registry, 1, 10)
    pacing._take(
        _costs(
            pacing,
            snapshot_stall_s=0.05,
            snapshot_busy_s=5.0,
            checkpoint_stall_s=0.0,
            checkpoint_busy_s=0.1,
        ),
        ALONE,
    )
    document: dict[str, Any] = pacing.document()

    assert document["snapshot_taken_steps"] == 5
    assert document["cost_share"] == pytest.approx(0.01)
    assert document["problems"] == []
    assert registry.get_sample_value("run_save_cost_ratio") == pytest.approx(0.01)


def test_the_reason_tells_the_interval_that_is_kept() -> None:
    """What would have been chosen beside a configured one was told, as if it were done."""
    pacing = _pacing(CollectorRegistry(), 1, "auto")
    pacing._take(
        _costs(
            pacing,
            snapshot_stall_s=0.015,
            snapshot_busy_s=0.1,
            checkpoint_stall_s=1.0,
            checkpoint_busy_s=1.0,
        ),
        ALONE,
    )
    document = pacing.document()

    assert document["snapshot_steps"] == 1
    assert document["reason"].startswith("snapshot every step (1 s")
