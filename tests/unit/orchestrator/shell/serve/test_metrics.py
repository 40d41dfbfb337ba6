"""Prometheus's series of a run, from its status document and the numbers of its journal."""

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
from orchestrator.shell.serve import NUM_TOLD, RunCollector
from tests.support.live_pages import told_of

README = Path(__file__).parents[5] / "dashboards" / "README.md"
RULES = README.with_name("rules.yml")
#: A metric of ours, and of which phases.
SELECTOR = re.compile(r'(everstep_\w+)(?:\{phase[=!~]+"([^"]*)"\})?')

STATUS: dict[str, Any] = {
    "attempt": 2,
    "step": 17,
    "loss": 2.5,
    "grad_norm": 0.5,
    "lr": 0.01,
    "validation_loss": None,
    "step_tokens": 2048.0,
    "step_s": {"p50": 0.25, "p99": 0.5},
    "at_s": 100.0,
    "goal": 400,
    "url": "http://head:8080",
    "directory": "s3://runs/small",
    "workers": [
        {
            "rank": 0,
            "node": "f" * 56,
            "worker": "w0001",
            "state": "training",
            "step": 17,
            "last_heartbeat_s": 0.1,
            "compute_s": 0.125,
            "data_s": 0.03125,
            "device_bytes": 30.0,
            "device_bytes_max": 80.0,
        },
        # One that only starts has not reported yet.
        {
            "rank": 1,
            "node": "e" * 56,
            "worker": "w0002",
            "state": "forming",
            "step": None,
            "last_heartbeat_s": None,
            "compute_s": None,
            "data_s": None,
            "device_bytes": None,
            "device_bytes_max": None,
        },
    ],
    "standbys": [{"state": "starting"}],
    "processes": {"training": 1, "forming": 1, "starting": 1},
    "layout": "parallel.tensor=2",
    "nodes": [
        {"node": letter * 56, "state": state}
        for letter, state in (("f", "alive"), ("e", "alive"), ("d", "lost"), ("c", "draining"))
    ],
    "node_states": {"alive": 2, "lost": 1, "draining": 1},
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


def _registry(*run_ids: str) -> CollectorRegistry:
    crash = Incident(
        kind="crash",
        number=1,
        guilty=("w0003",),
        places=((1, "w0003", "f" * 56),),
        evidence="the process was killed",
        t_detect_s=1.0,
        t_fence_s=1.5,
        t_decide_s=1.75,
        t_first_step_s=3.0,
        lost_steps=1,
        sources={"local memory": 100, "parity": 10},
    )
    hang = Incident(
        number=2,
        kind="hang",
        rule="missing",
        verdict="absent",
        cost_usd=0.25,
        t_detect_s=5.0,
        t_fence_s=5.25,
    )
    growth = Incident(number=3, kind="growth", t_detect_s=9.0)
    stats = RunStats(attempt=2, step=17, num_workers=2, phase="training", lost_steps=1)
    stats.incidents += [crash, hang, growth]
    stats.suspicions = {"absent": 4}
    stats.asked, stats.refused = {"0": 9}, {"0": 3}
    registry = CollectorRegistry()
    for run_id in run_ids or ("small-1",):
        registry.register(
            RunCollector(
                run="small", run_id=run_id, told=lambda: told_of(STATUS, stats, samples=16)
            )
        )
    return registry


_OF_RANK = {"rank": "0", "node": "f" * 12, "worker": "w0001"}
_SUSPECT = {"kind": "slow_compute", "rank": "1", "worker": "w0002", "node": "e" * 12}
_SUSPECTED_LINK = {"kind": "slow_link", "rank": "1 to 2", "worker": "", "node": ""}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("attempt", {}, 2),
        ("steps_total", {}, 18),
        ("step_samples", {}, 16),
        ("goal_steps", {}, 400),
        ("run_info", {"url": "http://head:8080", "directory": "s3://runs/small"}, 1),
        ("grad_norm", {}, 0.5),
        ("learning_rate", {}, 0.01),
        ("validation_loss", {}, None),
        ("step_duration_seconds", {"percentile": "p99"}, 0.5),
        ("incident_recovery_seconds", {"number": "1"}, 2),
        ("incident_recovery_seconds", {"number": "2"}, None),
        ("incident_lost_steps", {"number": "1"}, 1),
        ("incident_spent_usd", {"number": "2"}, 0.25),
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
        ("worker_step", _OF_RANK, 17),
        ("worker_step", {"rank": "1", "node": "e" * 12, "worker": "w0002"}, None),
        ("worker_compute_seconds", _OF_RANK, 0.125),
        ("worker_data_seconds", _OF_RANK, 0.03125),
        ("worker_device_bytes", _OF_RANK, 30),
        ("worker_device_bytes_max", _OF_RANK, 80),
        ("step_seconds", {}, None),
        ("save_every_steps", {"what": "checkpoint"}, 10),
        ("redundancy_reduced_seconds_total", {}, 30),
        ("step_tokens", {}, 2048),
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
def test_a_value_has_its_labels(name: str, labels: dict[str, str], expected: float | None) -> None:
    """An unknown value has no series: a zero would be drawn."""
    of_run = {"run": "small", "run_id": "small-1"}
    found = _registry().get_sample_value(f"everstep_{name}", {**of_run, **labels})

    assert found == expected


def test_an_incident_has_its_time_and_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mark on a curve must not move: the time is the same at each scrape."""
    clock = iter((1_700_000_100.4, 1_700_000_999.0))
    monkeypatch.setattr("orchestrator.shell.serve.metrics.wall_time", clock.__next__)
    registry = _registry()
    labels = {
        "run": "small",
        "run_id": "small-1",
        "number": "1",
        "kind": "crash",
        "who": "w0003",
        "nodes": "f" * 12,
        "why": "the process was killed",
    }

    for _ in range(2):
        found = registry.get_sample_value("everstep_incident_detected_timestamp_seconds", labels)
        assert found == 1_700_000_001.0


def test_runs_of_one_name_share_no_series() -> None:
    """Three runs called ``run`` had one board, and one alert."""
    series = [
        (sample.name, *sorted(sample.labels.items()))
        for metric in _registry("small-1", "small-2").collect()
        for sample in metric.samples
    ]

    assert len(series) > 100
    assert len(set(series)) == len(series)


def test_series_of_incidents_do_not_grow_with_the_run() -> None:
    """A run of months has thousands."""
    stats = RunStats()
    stats.incidents += [Incident(number=n, kind="crash", t_detect_s=1.0) for n in range(1, 1001)]
    collector = collector_of(STATUS, stats)

    numbers = {
        sample.labels["number"]
        for metric in collector.collect()
        for sample in metric.samples
        if "number" in sample.labels
    }

    assert numbers == {str(number) for number in range(981, 1001)}


def test_a_scrape_does_not_grow_with_a_large_run() -> None:
    """Six series a member and three a node were 500,000 of 10,000 nodes: seconds at each scrape."""
    num_told, nodes = [], [f"{number:056x}" for number in range(5000)]
    for num in (NUM_TOLD, len(nodes)):
        rows = [{**STATUS["workers"][0], "rank": rank} for rank in range(min(num, NUM_TOLD))]
        keepers = [{"node": node, "held_bytes": 1, "budget_bytes": 2} for node in nodes[:num]]
        status = {
            **STATUS,
            "workers": rows,
            "nodes": [
                {"node": node, "state": "draining" if node is nodes[num - 1] else "alive"}
                for node in nodes[:num]
            ],
            "redundancy": {**STATUS["redundancy"], "keepers": keepers},
        }
        found = collector_of(status, RunStats(num_workers=num)).prepare()()
        num_told.append(found.count(b"\n"))

        # The one that matters has a series, wherever it is among them.
        assert found.count(b"everstep_node_noticed{") == NUM_TOLD
        assert re.findall(rb"everstep_node_noticed{.*} 1.0", found)
        untold = re.findall(rb"everstep_workers_without_series{.*} (\d+)", found)
        assert untold == [str(num - NUM_TOLD).encode()]
    assert num_told[0] == num_told[1]


def collector_of(status: dict[str, Any], stats: RunStats) -> RunCollector:
    """Return the metrics of a run with that status and those numbers."""
    return RunCollector(run="small", run_id="small-1", told=lambda: told_of(status, stats))


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


def test_the_list_for_people_has_every_metric_with_its_labels() -> None:
    """People who write their own queries have nothing else to look at."""
    table = README.read_text().partition("## The metrics")[2]
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines() if row.startswith("| `")]
    listed = {name: set(row) for row in rows for name in row if name.startswith("everstep_")}
    told = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name: {
            label for sample in metric.samples for label in sample.labels
        }
        for metric in _registry().collect()
    }

    assert listed.keys() == told.keys()
    assert [
        name for name, labels in told.items() if labels - {"run", "run_id"} - listed[name]
    ] == []


def test_no_board_asks_for_an_unknown_metric() -> None:
    """Its panel would stay empty, also where no Prometheus is installed that shows it."""
    found = list(_registry().collect())
    told = {f"{one.name}_total" if one.type == "counter" else one.name for one in found}
    told |= set(re.findall(r"record: (\S+)", RULES.read_text()))
    boards = "".join(path.read_text() for path in (RULES.parent / "grafana").glob("*.json"))
    asked = set(re.findall(r"everstep[_:]\w+", boards))

    assert len(asked) > 40
    assert asked - told == set()


def test_no_rule_waits_for_an_unknown_metric() -> None:
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
