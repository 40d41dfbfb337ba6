"""What Prometheus reads of a run, from its status document and the numbers of its journal."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.core import RunStats
from orchestrator.core.log.incident import Incident
from orchestrator.shell.serve import RunCollector

RULES = Path(__file__).parents[5] / "dashboards" / "rules.yml"
#: A metric of ours, and of which phases.
SELECTOR = re.compile(r'(everstep_\w+)(?:\{phase[=!~]+"([^"]*)"\})?')

STATUS: dict[str, Any] = {
    "attempt": 2,
    "step": 17,
    "loss": 2.5,
    "workers": [
        {
            "rank": 0,
            "node": "f" * 56,
            "worker": "w0001",
            "state": "training",
            "step": 17,
            "last_heartbeat_s": 0.1,
        },
        # Of one that only starts nothing was heard yet.
        {
            "rank": 1,
            "node": "e" * 56,
            "worker": "w0002",
            "state": "forming",
            "step": None,
            "last_heartbeat_s": None,
        },
    ],
    "standbys": [{"state": "starting"}],
    "layout": "parallel.tensor=2",
    "nodes": [
        {"node": letter * 56, "state": state}
        for letter, state in (("f", "alive"), ("e", "alive"), ("d", "lost"), ("c", "draining"))
    ],
    "pending_capacity": 1,
    "capacity": [
        {
            "alternative": "0 spot",
            "asked": 4,
            "granted": 1,
            "refused": 3,
            "waits_s": 40.0,
            "refused_for_s": 10.0,
            "grant_s": None,
        }
    ],
    "cost": {"usd": 1.5, "usd_per_hour": 0.4, "usd_per_million_tokens": None},
    "redundancy": {
        "step": 16,
        "stored_step": 10,
        "node_losses_survived": 1,
        "reduced_s": 30.0,
        "reduced_for_s": 0.0,
        "keepers": [{"node": "f" * 56, "held_bytes": 22, "budget_bytes": 40}],
        "problems": ["one"],
    },
    "suspects": [
        {
            "kind": "slow_compute",
            "guilty": {"ranks": [1], "nodes": ["e" * 56], "links": []},
            "worker": "w0002",
            "for_s": 12.5,
            "times": 3.0,
        },
        {
            "kind": "slow_link",
            "guilty": {"ranks": [], "nodes": [], "links": [[1, 2]]},
            "worker": "",
            "for_s": 2.5,
            "times": 2.0,
        },
    ],
    "cadence": {
        "step_s": None,
        "snapshot_stall_s": None,
        "checkpoint_stall_s": None,
        "cost_share": None,
        "cost_share_max": 0.02,
        "snapshot_steps": 1,
        "checkpoint_steps": 10,
    },
}


def _registry() -> CollectorRegistry:
    crash = Incident(
        kind="crash",
        guilty=("w0003",),
        t_detect_s=1.0,
        t_fence_s=1.5,
        t_decide_s=1.75,
        sources={"local memory": 100, "parity": 10},
    )
    hang = Incident(
        kind="hang", rule="missing", verdict="absent", cost_usd=0.25, t_detect_s=5.0, t_fence_s=5.25
    )
    growth = Incident(kind="growth", t_detect_s=9.0)
    stats = RunStats(attempt=2, step=17, num_workers=2, phase="training", lost_steps=1)
    stats.incidents += [crash, hang, growth]
    stats.suspicions = {"absent": 4}
    stats.asked, stats.refused = {"0": 9}, {"0": 3}
    registry = CollectorRegistry()
    registry.register(
        RunCollector(
            run="small",
            status=lambda: STATUS,
            stats=stats,
            samples_per_step=16,
            tokens_per_step=0,
        )
    )
    return registry


_SUSPECT = {"kind": "slow_compute", "rank": "1", "worker": "w0002", "node": "e" * 12}
_SUSPECTED_LINK = {"kind": "slow_link", "rank": "1 to 2", "worker": "", "node": ""}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("attempt", {}, 2),
        ("steps_total", {}, 18),
        ("step_samples", {}, 16),
        ("phase", {"phase": "training"}, 1),
        ("phase", {"phase": "waiting"}, 0),
        ("incidents_total", {"kind": "crash"}, 1),
        ("incidents_by_rule_total", {"rule": "missing", "verdict": "absent"}, 1),
        ("incident_seconds_total", {"kind": "crash", "phase": "fence"}, 0.5),
        ("loaded_bytes_total", {"source": "parity"}, 10),
        ("verdicts_total", {"who": "named"}, 1),
        ("verdicts_total", {"who": "undecided"}, 1),
        ("nodes", {"state": "alive"}, 2),
        ("suspected_seconds", _SUSPECT, 12.5),
        ("suspected_times", _SUSPECT, 3),
        ("suspected_times", _SUSPECTED_LINK, 2),
        ("suspicions_total", {"kind": "absent"}, 4),
        ("node_noticed", {"node": "c" * 12}, 1),
        ("node_noticed", {"node": "f" * 12}, 0),
        ("node_noticed", {"node": "d" * 12}, None),
        ("layout_info", {"layout": "parallel.tensor=2"}, 1),
        ("keeper_held_bytes", {"node": "f" * 12}, 22),
        ("keeper_budget_bytes", {"node": "f" * 12}, 40),
        ("worker_processes", {"state": "starting"}, 1),
        ("worker_step", {"attempt": "2", "rank": "0", "node": "f" * 12, "worker": "w0001"}, 17),
        ("worker_step", {"attempt": "2", "rank": "1", "node": "e" * 12, "worker": "w0002"}, None),
        ("step_seconds", {}, None),
        ("save_every_steps", {"what": "checkpoint"}, 10),
        ("redundancy_reduced_seconds_total", {}, 30),
        ("step_tokens", {}, None),
        ("reservations_granted", {"alternative": "0 spot"}, 1),
        ("reservations_refused", {"alternative": "0 spot"}, 3),
        ("reservations_refused_for_seconds", {"alternative": "0 spot"}, 10),
        ("reservations_grant_seconds", {"alternative": "0 spot"}, None),
        ("reservation_requests_total", {"alternative": "0 spot"}, 9),
        ("reservation_refusals_total", {"alternative": "0 spot"}, 3),
        ("cost_usd_total", {}, 1.5),
        ("incident_cost_usd_total", {"kind": "hang"}, 0.25),
    ],
)
def test_a_value_is_told_with_its_labels(
    name: str, labels: dict[str, str], expected: float | None
) -> None:
    """What is not known yet has no series: a zero would be drawn."""
    found = _registry().get_sample_value(f"everstep_{name}", {"run": "small", **labels})

    assert found == expected


def test_names_and_types_are_as_prometheus_asks() -> None:
    """Its own linter knows the conventions."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Debian's prometheus")

    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(_registry()),
        capture_output=True,
        check=False,
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_no_rule_waits_for_what_nobody_tells() -> None:
    """Prometheus finds nothing wrong with a rule on a metric that was renamed: it never fires."""
    told: dict[str, set[str]] = {}
    for metric in _registry().collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        told[name] = {sample.labels.get("phase", "") for sample in metric.samples}
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    read = [found for rule in rules for found in SELECTOR.findall(rule["expr"])]

    assert len(read) >= len(rules) - 1  # `up` is Prometheus's own
    assert {name for name, _ in read} <= told.keys()
    for name, phases in read:
        assert set(filter(None, phases.split("|"))) <= told[name]
