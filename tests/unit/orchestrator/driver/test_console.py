import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from orchestrator.config import load
from orchestrator.core import Bounds
from orchestrator.detection import Limits, limits_from
from orchestrator.driver import RunView, open_console, print_bounds, print_node_plans, print_plan
from orchestrator.policies import RecoveryPlan
from orchestrator.policies.whatif import PartSource
from orchestrator.report import bounds_document
from tests.support.statuses import status_document

PLAN = RecoveryPlan(
    lost_nodes=("bb",),
    lost_workers=("w0001",),
    step=8,
    attempt=1,
    source="memory",
    lost_steps=1,
    parts=(PartSource(rank=0, source="local memory", node="aa", size_bytes=5_000_000),),
    bytes_by_source={"local memory": 5_000_000},
    workers_before=2,
    workers_after=1,
    layout_after="1 worker",
    step_s_after=0.25,
)


def _printed(plan: RecoveryPlan) -> str:
    output = io.StringIO()
    print_plan(plan, Console(file=output, width=60))
    return output.getvalue()


def test_a_plan_says_what_is_lost_where_it_comes_from_and_who_goes_on() -> None:
    """It is read by somebody who is about to switch a machine off."""
    text = _printed(PLAN)

    assert "lost: bb, w0001" in text
    assert "resumes after step 8 of attempt 1, from memory; 1 step to redo" in text
    assert "loads 4.8 MiB from local memory" in text
    assert "part of rank 0: 4.8 MiB from local memory of node aa" in text
    assert "workers: 2 now, then 1 (1 worker, about 0.25 s a step)" in text


def test_the_loss_of_each_node_is_a_line() -> None:
    """Half of a table that is too wide names the wrong machine."""
    output = io.StringIO()
    waiting = replace(PLAN, lost_nodes=("cc",), step=0, bytes_by_source={}, workers_after=0)
    print_node_plans([PLAN, waiting], Console(file=output, width=40))

    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert lines[1:] == [
        "bb step 8 1 4.8 MiB from local memory 2 -> 1",
        "cc from step 0 1 - 2 -> waits for capacity",
    ]


def test_a_plan_without_a_version_or_workers_does_not_sound_like_one() -> None:
    """Zero is a number like others, unless it is said what it means."""
    text = _printed(replace(PLAN, step=0, source="", parts=(), bytes_by_source={}, workers_after=0))

    assert "restarts from step 0" in text
    assert "waits for new capacity" in text


def test_what_a_library_says_in_brackets_is_printed_as_it_is() -> None:
    """Gloo names its source file in brackets, which ended the command that showed it."""
    output = io.StringIO()
    evidence = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:537] Connection closed"
    cause = {"kind": "peer_lost", "guilty": [], "evidence": evidence, "at_s": 1.0}
    status = status_document(phase="fencing", cause=cause)
    with RunView(Console(file=output, width=200), title="a run", total_steps=5) as view:
        view.show(status)

    assert f"a run  peer_lost: {evidence}" in output.getvalue()


def test_a_version_that_was_passed_over_is_named_once() -> None:
    """A user whose run resumes from an older file than the newest should know why."""
    output = io.StringIO()
    passed_over = ["step-00000004: manifest.json is cut short"]
    status = status_document(passed_over=passed_over)
    with RunView(Console(file=output, width=200), title="a run", total_steps=5) as view:
        view.show(status)
        view.show(status)

    assert output.getvalue().count("skipped step-00000004: manifest.json is cut short") == 1


def test_a_controller_that_was_never_heard_is_not_said_to_have_gone() -> None:
    """After a slow start nothing is wrong, and nothing trains yet without it."""
    output = io.StringIO()
    status = status_document(phase="waiting", step=0, loss=None, workers=[], cause=None)
    with RunView(Console(file=output, width=200), title="a run", total_steps=5) as view:
        view.show(None)
        assert output.getvalue() == ""
        view.show(status)
        assert "answers again" not in output.getvalue()
        view.show(None)
        assert "training continues" not in output.getvalue()
        view.show(status)

    assert "the controller does not answer" in output.getvalue()
    assert "answers again" in output.getvalue()


def _shown(*statuses: dict[str, Any], width: int = 200) -> list[str]:
    output = io.StringIO()
    with RunView(Console(file=output, width=width), title="a run", total_steps=400) as view:
        for status in statuses:
            view.show(status)
    return [line.removeprefix("a run").strip() for line in output.getvalue().splitlines()]


def _waiting(for_s: float, *states: str, **changes: Any) -> dict[str, Any]:
    standbys = [{"worker": f"w{n}", "state": state} for n, state in enumerate(states)]
    unknown: dict[str, Any] = {"loss": None, "cause": None, "capacity": [], "workers": []}
    unknown["redundancy"] = {"problems": []}
    return status_document(
        phase="waiting", step=0, phase_for_s=for_s, standbys=standbys, **{**unknown, **changes}
    )


def test_a_wait_says_once_for_what_and_since_when() -> None:
    """Seven equal lines of "waiting" left a newcomer to guess."""
    lines = _shown(
        *(_waiting(1.2 * number, "starting", "starting") for number in range(8)),
        _waiting(12.4, "ready", "starting"),
    )

    assert lines == [
        "Waits for workers. Processes: 2 starting.",
        "Waits for workers. Processes: 1 ready, 1 starting. (for 12 s)",
    ]


def test_a_recovery_says_what_it_waits_for_only_if_it_takes_long() -> None:
    """Three lines for half a second would hide those that matter."""
    cause = {"kind": "crash", "guilty": ["w0001"], "evidence": "its process died", "at_s": 9.0}
    short = (
        status_document(phase=phase, phase_for_s=0.6, cause=cause)
        for phase in ("fencing", "reading", "forming")
    )
    slow = status_document(phase="reading", phase_for_s=7, cause=cause, waits_for="storage")
    lines = [line for line in _shown(*short, slow) if "problem" not in line]

    assert lines[0] == "crash (w0001): its process died"
    assert lines[-1].startswith("Looks for the newest step that is safe. Waits for storage.")
    assert [line for line in lines if "Stops" in line or "forms" in line] == []


def test_a_cause_that_is_found_later_is_printed_too() -> None:
    """A neighbour's broken connection was all that a user read of a worker that was killed."""
    first = {"kind": "peer_lost", "guilty": [], "evidence": "w0001 left", "at_s": 9.0}
    found = {"kind": "crash", "guilty": ["w0002"], "evidence": "SIGKILL", "at_s": 9.0}
    lines = _shown(*(status_document(cause=each) for each in (first, first, found, found)))

    causes = ["peer_lost: w0001 left", "crash (w0002): SIGKILL"]
    assert [line for line in lines if line.startswith(("peer_lost", "crash"))] == causes


def test_an_incident_between_two_looks_is_printed_once() -> None:
    """A crash was followed by growth at once, and the terminal did not print it."""
    grown = {"kind": "growth", "guilty": [], "evidence": "a worker is ready", "at_s": 9.0}
    crash = {"kind": "crash", "guilty": ["w0002"], "evidence": "process 7 died of SIGKILL"}
    two = [
        {**crash, "number": 4},
        {**grown, "number": 5, "evidence": "rank 1 is slow; a worker is ready"},
    ]
    statuses = [
        status_document(cause=None, incidents=[{**crash, "number": 3, "guilty": ["w0001"]}]),
        status_document(cause=grown, incidents=two[:1]),
        status_document(cause=grown, incidents=two),
    ]
    lines = _shown(*statuses, *statuses[1:])

    assert [line for line in lines if line.startswith(("crash", "growth"))] == [
        "growth: a worker is ready",
        "crash (w0002): process 7 died of SIGKILL",
    ]


def test_a_lost_node_is_printed_at_once_also_before_the_first_step() -> None:
    """Eight lines of "waiting" followed, and only the report told that a machine was gone."""
    lost = {**status_document()["nodes"][0], "state": "lost"}
    lines = _shown(_waiting(3, "starting"), *[_waiting(4, "starting", nodes=[lost])] * 2)
    cause = {"kind": "node_loss", "guilty": [], "evidence": "node f6a90903: gone", "at_s": 1.0}
    grown = {"kind": "growth", "guilty": [], "evidence": "grow", "at_s": 2.0}
    known = _shown(*(status_document(nodes=[lost], cause=each) for each in (cause, grown)))

    assert [line for line in lines if "f6a90903" in line] == [
        "node f6a90903 is lost",
        "Waits for workers. Processes: 1 starting. Lost: node f6a90903. (for 4 s)",
    ]
    assert [line for line in known if "f6a90903" in line] == ["node_loss: node f6a90903: gone"]


def test_a_drain_is_printed_once_while_its_seconds_run_down() -> None:
    """A run of two minutes had 125 lines that a node goes in 30 s, in 29 s, and so on."""
    node = {**status_document()["nodes"][0], "state": "draining", "notice": "drained from the page"}
    told = [status_document(nodes=[{**node, "taken_in_s": left_s}]) for left_s in (30, 29, 28)]

    found = [line for line in _shown(*told) if "drained" in line]
    assert found == ["node f6a90903 goes in 30 s (drained from the page)"]


def test_the_bar_has_rate_time_left_validation_and_money_on_one_line_of_80_columns() -> None:
    output = io.StringIO()
    terminal = Console(file=output, width=80, force_terminal=True, color_system=None)
    with RunView(terminal, title="char4", total_steps=400) as view:
        view.show(status_document(validation_loss=2.31, cause=None))
        view._progress.refresh()
    bars = [line for line in output.getvalue().splitlines() if "95/400" in line]

    assert "loss 2.266 val 2.310 3.9/s ETA 1:18 $1.50 1 worker" in bars[-1]
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in bars) <= 80


def test_a_pipe_gets_plain_lines_though_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notebooks and CI set FORCE_COLOR, and got the bar again with each of its changes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunView(open_console(), title="char4", total_steps=400) as view:
        view.show(status_document(cause=None))
        view._progress.refresh()
    shown = capsys.readouterr().out

    assert "step 95/400" in shown
    assert "\r" not in shown
    assert "\x1b[2K" not in shown


def test_every_wait_is_printed_at_the_start_the_shortest_first() -> None:
    """A bound that is not told is a surprise later; two that are out of order hide each other."""
    config = load("run: {directory: runs/x}\nworkers: {max: 2}\nrecovery: {patience: 6}\n")
    limits = limits_from(0.0, patience=config.recovery.patience)
    bounds_s = bounds_document(config, limits)
    output = io.StringIO()
    print_bounds(bounds_s, config.recovery.patience, Console(file=output, width=1000))

    waits = {
        *Limits.__slots__,
        *Bounds.__slots__,
        "collective",
        "controller_stopped",
        "machine_silent",
        "lease",
    }
    assert bounds_s.keys() == {name.removesuffix("_s") for name in waits}
    assert list(bounds_s.values()) == sorted(bounds_s.values())
    assert "recovery.patience=6" in output.getvalue()
    assert "hang 6 s" in output.getvalue()
    assert "fence 4 s" in output.getvalue()


def test_a_line_of_the_script_is_printed_as_it_is() -> None:
    """A user looks for the words that the script printed, brackets and all."""
    output = io.StringIO()
    with RunView(Console(file=output, width=20), title="a run", total_steps=5) as view:
        view.print("[red] loss 3.25 after [step 7] of 100")

    assert output.getvalue() == "[red] loss 3.25 after [step 7] of 100\n"
