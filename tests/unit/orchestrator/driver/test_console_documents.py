"""People read about a run in a terminal that may be narrow."""

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from orchestrator.driver import print_status, status_view
from tests.support.statuses import status_document


def _lines(status: dict[str, Any], *, verbose: bool = False) -> list[str]:
    output = io.StringIO()
    print_status(status, Console(file=output, width=60), verbose=verbose)
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_names_and_places_can_be_copied_from_a_narrow_terminal() -> None:
    """A process id that was cut off ends the wrong process."""
    lines = _lines(status_document())

    assert lines[0] == (
        "training: attempt 2 on dp_shard=4, step 95 of 400, loss 2.2657, 3.9 steps/s, ETA 1:18"
    )
    assert "0 w0002 f6a90903 23457 training step 96, backward 0.9 s ago" in lines
    assert "standby w0005 f6a90903 - starting - -" in lines
    assert "f6a90903 alive 23231 - 2 3" in lines


def test_what_is_safe_and_what_is_wrong_has_a_line_each() -> None:
    """Somebody looks because something may be lost."""
    lines = _lines(status_document())

    first = "capacity 0 spot: asked 4, granted 2, refused 2: no machine left, for 12 s"
    assert lines[lines.index(first) :] == [
        first,
        "capacity 1 on-demand: asked 2, granted 0, for 11 s",
        "cost: $1.50, $0.80 an hour, $0.25 per million tokens",
        "in memory: step 95, survives the loss of 1 node (partner copy)",
        "in storage: step 90",
        "redundancy: partner copy [of all]",
        "saves: a snapshot each step, a checkpoint every 10 steps; 0.71% of step time, at most 2%",
        "intervals: as configured",
        "loaded: 4.8 MiB from local memory",
        "skipped: step-00000004: manifest.json is cut short",
        "problem: storage has been silent for 12 s",
        "evidence: runs/a/incidents/0003 (everstep diagnose reads it)",
        "last change: crash (w0001): its process died",
    ]


def test_a_machine_that_is_taken_has_a_line() -> None:
    """A reader wants to know why there will soon be fewer workers, and how soon."""
    (node,) = status_document()["nodes"]
    said = {"state": "draining", "notice": "aws: spot instance, stop"}
    other = {**node, "node": "0" * 56}
    when = [{**node, **said, "taken_in_s": 95}, {**other, **said, "taken_in_s": None}]
    lines = _lines(status_document(nodes=[node, *when], controller_notice="gcp: preempted"))

    assert [line for line in lines if line.startswith("notice")] == [
        "notice: node f6a90903 goes in 95 s (aws: spot instance, stop)",
        "notice: node 00000000 goes (aws: spot instance, stop)",
        "notice: the controller's machine goes (gcp: preempted)",
    ]


def test_the_console_says_what_a_recovery_waits_for() -> None:
    """It may be for hours, with all nodes in good health."""
    status = status_document(phase="reading", waits_for="checkpoints/: storage does not answer")
    assert _lines(status)[1] == (
        "Looks for the newest step that is safe. Waits for checkpoints/: storage does not answer. "
        "Cause: crash of w0001: its process died. (for 41 s)"
    )
    assert _lines({**status, "controller": "down"})[-1] == (
        "waits for: checkpoints/: storage does not answer"
    )


def test_the_console_says_what_other_runs_need() -> None:
    """A run that trains on half its workers looks as if nodes were lost."""
    status = status_document(shared={"limit": 2, "runs": ["urgent-1"]})
    assert "at most 2 workers: other runs need the rest (urgent-1)" in _lines(status)


def test_the_bounds_of_waits_are_shown_on_request() -> None:
    """They fill three lines that few people read."""
    bounds = "bounds of waits: beat 0.1 s, hang 5.221 s"

    assert bounds not in _lines(status_document())
    assert _lines(status_document(), verbose=True)[-1] == bounds


@pytest.mark.parametrize(
    ("due", "taken", "line"),
    [
        (1, 5, "a snapshot each step (in fact every 5 steps: the copies take longer)"),
        (2, 2, "a snapshot every 2 steps, a checkpoint"),
        (2, None, "a snapshot every 2 steps, a checkpoint"),
        (0, 0, "saves: a checkpoint"),
    ],
)
def test_the_console_names_a_link_that_stretches_the_interval(
    due: int, taken: int | None, line: str
) -> None:
    """A user who reads "each step" while four of five are skipped expects to lose less."""
    status = status_document()
    status["cadence"] |= {"snapshot_steps": due, "snapshot_taken_steps": taken}
    assert line in " ".join(_lines(status))


def test_a_run_without_controller_says_so_and_what_is_not_there_has_no_line() -> None:
    """The last known state must not be taken for the present one."""
    nothing = {"step": 0, "stored_step": 0, "node_losses_survived": 0, "reason": "", "problems": []}
    lines = _lines(
        status_document(
            controller="down",
            loss=None,
            steps_per_s=None,
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
        (
            "training: attempt 2 on dp_shard=4, step 95 of 400; "
            "the controller is down: last known state"
        ),
        "",
        "in storage: nothing yet",
        "saves: a snapshot each step, a checkpoint every 10 steps; 0.71% of step time, at most 2%",
        "intervals: as configured",
    ]


_INCIDENT = {
    "number": 3,
    "kind": "node_loss",
    "who": "w0001, w0003",
    "evidence": "node aeed281d: its raylet refuses connections",
    "lost_steps": 0,
    "recovery_s": 2.54,
    "found_s": 22.4,
}


def test_the_last_incidents_say_what_they_cost() -> None:
    """After a fault people ask first whether the run is back."""
    open_one = {**_INCIDENT, "number": 4, "kind": "hang", "who": "\N{EN DASH}"}
    open_one |= {"recovery_s": None, "found_s": None, "evidence": "no step"}
    lines = _lines(status_document(incidents=[_INCIDENT, open_one]))

    assert lines[lines.index("incident 4: hang: no step") + 1] == (
        "incident 3, 22 s ago: node_loss (w0001, w0003): node aeed281d: its raylet refuses "
        "connections; back in 2.5 s, 0 steps lost"
    )
    assert not [line for line in lines if line.startswith("last change")]


def test_memory_that_is_not_protected_is_said_so() -> None:
    redundancy = {**status_document()["redundancy"], "node_losses_survived": 0}
    status = status_document(redundancy=redundancy)

    assert "in memory: step 95, would not survive a node loss" in _lines(status)


def test_a_live_status_fits_its_terminal_and_shows_what_is_lost() -> None:
    """Lines of 166 characters were broken anywhere, and a lost node looked like a living one."""
    (node,) = status_document()["nodes"]
    status = status_document(nodes=[node, {**node, "state": "lost"}], incidents=[_INCIDENT])
    output = io.StringIO()
    terminal = Console(
        file=output, width=80, height=60, force_terminal=True, color_system="standard"
    )
    with Live(console=terminal, auto_refresh=False) as live:
        live.update(status_view(status), refresh=True)
        live.update(status_view(status), refresh=True)
    text = output.getvalue()

    assert "\x1b[2J" not in text  # which takes what was there before
    assert "\x1b[1;31mlost\x1b[0m" in text
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines())) <= 80


def test_ranks_that_seem_slow_in_turn_are_one_line_about_the_machine() -> None:
    """Each rank had a line of its own, and a link that is slow must not be hidden by them."""
    slow = {"kind": "slow_compute", "guilty": {"ranks": [1]}, "evidence": "Rank 1 is slow"}
    link = {"kind": "slow_link", "guilty": {"links": [[0, 1]]}, "evidence": "a link is slow"}
    for busy, expected in (("", "Rank 1 is slow"), ("the machines are busy", None)):
        lines = _lines(status_document(suspects=[slow, link], busy=busy))
        found = [line for line in lines if line.startswith("suspected: ")]
        assert found[0] == f"suspected: {expected or busy}"
        assert found[1:] == ["suspected: a link is slow"]
