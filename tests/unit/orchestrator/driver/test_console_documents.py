"""People read about a run in a terminal that may be narrow."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.driver import print_status

NODE = "f6a909039539fb880232d2aefe062783cc607b650ff1be024369a081"


def _status(**changes: Any) -> dict[str, Any]:
    worker = {"worker": "w0002", "node": NODE, "pid": 23457, "state": "training"}
    standby = {"worker": "w0005", "node": NODE, "pid": None, "state": "starting"}
    return {
        "phase": "training",
        "attempt": 2,
        "step": 95,
        "loss": 2.26571,
        "layout": "dp_shard=4",
        "workers": [
            {**worker, "rank": 0, "step": 96, "phase": "backward", "last_heartbeat_s": 0.893},
        ],
        "standbys": [{**standby, "step": None, "phase": None, "last_heartbeat_s": None}],
        "nodes": [
            {
                "node": NODE,
                "raylet_pid": 23231,
                "keeper_pid": None,
                "state": "alive",
                "reservations": [2, 3],
            }
        ],
        "pending_capacity": 2,
        "capacity": [
            {
                "alternative": "0 spot",
                "asked": 4,
                "granted": 2,
                "refused": 2,
                "waits_s": 70.0,
                "refused_for_s": 12.0,
                "grant_s": None,
                "why": "no machine left",
            },
            {
                "alternative": "1 on-demand",
                "asked": 2,
                "granted": 0,
                "refused": 0,
                "waits_s": 11.0,
                "refused_for_s": 0.0,
                "grant_s": None,
                "why": "",
            },
        ],
        "cost": {"usd": 1.5, "usd_per_hour": 0.8, "usd_per_million_tokens": 0.25},
        "redundancy": {
            "step": 95,
            "stored_step": 90,
            "node_losses_survived": 1,
            "reason": "partner copy [of all]",
            "problems": ["storage has been silent for 12 s"],
        },
        "cadence": {
            "snapshot_steps": 1,
            "snapshot_taken_steps": 1,
            "checkpoint_steps": 10,
            "cost_share": 0.00714,
            "cost_share_max": 0.02,
            "problems": [],
            "reason": "as configured",
        },
        "loaded": {"local memory": 5_000_000},
        "passed_over": ["step-00000004: manifest.json is cut short"],
        "directory": "runs/a",
        "evidence": "incidents/0003",
        "cause": {"kind": "crash", "guilty": ["w0001"], "evidence": "its process died"},
        "shared": None,
        "waits_for": "",
        "reason": "",
        "bounds_s": {"beat": 0.1, "hang": 5.221},
        "controller": "alive",
        **changes,
    }


def _lines(status: dict[str, Any], *, verbose: bool = False) -> list[str]:
    output = io.StringIO()
    print_status(status, Console(file=output, width=60), verbose=verbose)
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_who_is_where_can_be_read_and_copied_in_a_narrow_terminal() -> None:
    """A process id that was cut off ends the wrong process."""
    lines = _lines(_status())

    assert lines[0] == "training: attempt 2 on dp_shard=4, step 95, loss 2.2657"
    assert "0 w0002 f6a90903 23457 training step 96, backward 0.9 s ago" in lines
    assert "standby w0005 f6a90903 - starting - -" in lines
    assert "f6a90903 alive 23231 - 2 3" in lines


def test_what_is_safe_and_what_is_wrong_has_a_line_each() -> None:
    """Somebody looks because something may be lost."""
    lines = _lines(_status())

    first = "capacity 0 spot: asked 4, granted 2, refused 2: no machine left, for 12 s"
    assert lines[lines.index(first) :] == [
        first,
        "capacity 1 on-demand: asked 2, granted 0, for 11 s",
        "cost: 1.50 dollars, 0.80 an hour, 0.25 per million tokens",
        "in memory: step 95, survives the loss of 1 node",
        "in storage: step 90",
        "redundancy: partner copy [of all]",
        "saves: a snapshot each step, a checkpoint every 10 steps; 0.71% of step time, at most 2%",
        "intervals: as configured",
        "loaded: 4.8 MiB from local memory",
        "passed over: step-00000004: manifest.json is cut short",
        "problem: storage has been silent for 12 s",
        "last change: crash (w0001): its process died",
        "evidence: runs/a/incidents/0003 (everstep diagnose reads it)",
    ]


def test_a_machine_that_is_taken_has_a_line() -> None:
    """A reader wants to know why there will soon be fewer workers, and how soon."""
    (node,) = _status()["nodes"]
    said = {"state": "draining", "notice": "aws: spot instance, stop"}
    other = {**node, "node": "0" * 56}
    when = [{**node, **said, "taken_in_s": 95}, {**other, **said, "taken_in_s": None}]
    lines = _lines(_status(nodes=[node, *when], controller_notice="gcp: preempted"))

    assert [line for line in lines if line.startswith("notice")] == [
        "notice: node f6a90903 goes in 95 s (aws: spot instance, stop)",
        "notice: node 00000000 goes (aws: spot instance, stop)",
        "notice: the controller's machine goes (gcp: preempted)",
    ]


def test_what_a_recovery_waits_for_is_told() -> None:
    """It may be for hours, with all nodes in good health."""
    status = _status(phase="reading", waits_for="checkpoints/: storage does not answer")
    assert _lines(status)[-1] == "waits for: checkpoints/: storage does not answer"


def test_what_other_runs_need_is_told() -> None:
    """A run that trains on half its workers looks as if nodes were lost."""
    status = _status(shared={"limit": 2, "runs": ["urgent-1"]})
    assert _lines(status)[-1] == "at most 2 workers: other runs need the rest (urgent-1)"


def test_the_bounds_of_waits_are_shown_on_request() -> None:
    """They fill three lines that few people read."""
    bounds = "bounds of waits: beat 0.1 s, hang 5.221 s"

    assert bounds not in _lines(_status())
    assert _lines(_status(), verbose=True)[-1] == bounds


@pytest.mark.parametrize(
    ("due", "taken", "line"),
    [
        (1, 5, "a snapshot each step (in fact every 5 steps: the copies take longer)"),
        (2, 2, "a snapshot every 2 steps, a checkpoint"),
        (2, None, "a snapshot every 2 steps, a checkpoint"),
        (0, 0, "saves: a checkpoint"),
    ],
)
def test_a_link_that_stretches_the_interval_is_told(due: int, taken: int | None, line: str) -> None:
    """A user who reads "each step" while four of five are skipped expects to lose less."""
    status = _status()
    status["cadence"] |= {"snapshot_steps": due, "snapshot_taken_steps": taken}
    assert line in " ".join(_lines(status))


def test_a_run_without_controller_says_so_and_what_is_not_there_has_no_line() -> None:
    """The last known state must not be taken for the present one."""
    nothing = {"step": 0, "stored_step": 0, "node_losses_survived": 0, "reason": "", "problems": []}
    lines = _lines(
        _status(
            controller="down",
            loss=None,
            workers=[],
            standbys=[],
            nodes=[],
            pending_capacity=0,
            capacity=[],
            cost={"usd": None, "usd_per_hour": None, "usd_per_million_tokens": None},
            redundancy=nothing,
            loaded={},
            passed_over=[],
            evidence="",
            cause=None,
            bounds_s={},
        )
    )

    assert lines == [
        "training: attempt 2 on dp_shard=4, step 95; the controller is down: last known",
        "",
        "in storage: nothing yet",
        "saves: a snapshot each step, a checkpoint every 10 steps; 0.71% of step time, at most 2%",
        "intervals: as configured",
    ]
