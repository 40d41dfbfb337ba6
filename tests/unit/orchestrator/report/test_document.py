"""A run has one document, and everything that people and tools read are views of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from orchestrator.core import describe
from orchestrator.driver import print_status
from orchestrator.report import RunDocument, Seen, tell
from orchestrator.shell.serve import Live, RunCollector
from tests.support.histories import calm
from tests.support.journals import Journaled, config_at

REDUNDANCY: dict[str, Any] = {
    "step": 96,
    "stored_step": 80,
    "node_losses_survived": 1,
    "mechanism": "partner copy",
    "reason": "",
    "keepers": [],
    "problems": ["one keeper is late"],
    "reduced_s": 1.5,
    "reduced_for_s": 0.0,
}
CADENCE: dict[str, Any] = {
    **dict.fromkeys(("step_s", "snapshot_stall_s", "checkpoint_stall_s", "cost_share")),
    "snapshot_steps": 1,
    "snapshot_taken_steps": None,
    "checkpoint_steps": 10,
    "cost_share_max": 0.02,
    "problems": [],
    "reason": "as configured",
}


@pytest.fixture
def run(tmp_path: Path) -> Journaled:
    """Return a run of four workers that has lost one and trains again."""
    run = Journaled(config_at(tmp_path, "train.global_batch=16"), fault_every=20)
    run.grow(150)
    return run


def _told(run: Journaled) -> RunDocument:
    """Return what its controller tells, which has heard of all members but the last one."""
    described = describe(run.state)
    names = [row["worker"] for row in described["members"][:-1]]
    reports = {name: calm(name, rank) for rank, name in enumerate(names)}
    return tell(
        described,
        run.stats,
        run.config,
        seen=Seen(at_s=run.at_s, reports=reports, seen_at_s=dict.fromkeys(reports, run.at_s)),
        url="http://head:8080",
        step_s={"p50": 0.1},
        bounds_s={},
        redundancy=REDUNDANCY,
        cadence=CADENCE,
    )


def _samples(told: RunDocument) -> dict[str, float]:
    """Return the metrics by name and own labels."""
    collector = RunCollector(run="r", run_id="r-1", told=lambda: told)
    families = text_string_to_metric_families(collector.prepare()().decode())
    return {
        " ".join([one.name, *(one.labels[key] for key in one.labels if "run" not in key)]): (
            one.value
        )
        for family in families
        for one in family.samples
    }


def _page(told: RunDocument, run: Journaled) -> dict[str, Any]:
    live = Live(
        config=run.config,
        store=run.store,
        path=run.path,
        told=lambda: told,
        reports={},
        at_s=lambda: run.at_s,
    )
    document: dict[str, Any] = json.loads(live.made())
    return document


def test_page_status_terminal_and_metrics_tell_the_same(run: Journaled) -> None:
    """Each made its own document of the run: a fact could be right in one and wrong in another."""
    told = _told(run)
    page, status, metrics = _page(told, run), told.status, _samples(told)
    output = io.StringIO()
    print_status({**status, "controller": "alive"}, Console(file=output, width=300))

    assert page["num_incidents"] == len(run.stats.incidents) > 1
    for kind in page["kinds"]:
        assert metrics[f"everstep_incidents_total {kind['kind']}"] == kind["count"]
    last, newest = status["incidents"][-1], page["incidents"][0]
    assert [last[name] for name in ("number", "kind", "who", "recovery_s", "lost_steps")] == [
        newest[name] for name in ("number", "kind", "who", "recovery_s", "lost_steps")
    ]
    number = f"{last['number']}"
    assert metrics[f"everstep_incident_recovery_seconds {number}"] == newest["recovery_s"]
    assert f"incident {number}, " in output.getvalue()
    for part, took_s in page["parts_s"].items():
        assert metrics[f"everstep_time_seconds {part}"] == took_s
    assert metrics["everstep_goodput_ratio"] == page["goodput"] > 0.0
    assert metrics["everstep_steps_total"] == run.stats.step + page["lost_steps"]
    assert metrics["everstep_snapshot_step"] == 96 == status["redundancy"]["step"]
    assert page["safe"][0][1].startswith("step 96: survives")
    assert "in memory: step 96, survives" in output.getvalue()
    assert metrics["everstep_keeper_problems"] == 1
    assert "problem: one keeper is late" in output.getvalue()
    workers = [row["worker"] for row in status["workers"]]
    assert [row["worker"] for row in page["live"]["workers"]] == workers


def test_a_member_that_was_not_heard_of_yet_has_a_row_without_numbers(run: Journaled) -> None:
    """A controller that has just restarted knows its members before they report."""
    told = _told(run)
    *_, late = told.status["workers"]
    metrics = _samples(told)

    assert (late["step"], late["last_heartbeat_s"], late["compute_s"]) == (None, None, None)
    heard = [name for name in metrics if name.startswith("everstep_worker_step ")]
    assert len(heard) == len(told.status["workers"]) - 1
    assert not [name for name in heard if late["worker"] in name]


def test_what_no_controller_has_seen_is_null(run: Journaled) -> None:
    """Zeros would say that a request was just made, and that an incident was just found."""
    status = tell(describe(run.state), run.stats, run.config, seen=Seen()).status

    assert [row["found_s"] for row in status["incidents"]] == [None] * len(status["incidents"])
    assert [row["waits_s"] for row in status["capacity"]] == [None]
    assert (status["phase_for_s"], status["at_s"], status["loss"]) == (None, None, None)
    assert {row["step"] for row in status["workers"]} == {None}
