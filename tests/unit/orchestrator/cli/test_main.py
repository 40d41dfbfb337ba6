from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.main import _ending, _finish, app
from tests.support.run_directories import write_run


def test_a_result_is_printed_as_text_and_as_json(tmp_path: Path) -> None:
    """A command that works in silence passes every test of its exit code."""
    write_run(tmp_path)
    text = CliRunner().invoke(app, ["report", str(tmp_path)])
    machine = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])

    assert text.stdout == f"report: {tmp_path}/report.html\n"
    assert json.loads(machine.stdout) == {"report": f"{tmp_path}/report.html"}


def test_a_run_that_was_stopped_says_how_it_goes_on_and_names_nothing_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What only a completed run has was printed as ``None``."""
    summary: dict[str, object] = {
        "weights_digest": None,
        "outcome": "stopped",
        "reason": "everstep stop",
        "steps": 203,
        "goodput": 0.7814239227056647,
        "incidents": [],
        "phases_s": {},
    }

    _finish(summary, as_json=False)
    text = capsys.readouterr()
    _finish(summary, as_json=True)
    machine = capsys.readouterr()

    assert text.out == "outcome: stopped\nsteps: 203\ngoodput: 0.781424\n"
    assert (
        text.err == "stopped after step 203: everstep stop; the same command goes on from there\n"
    )
    assert json.loads(machine.out) == summary


def test_bad_input_is_exit_code_2_and_one_message_on_stderr(tmp_path: Path) -> None:
    """A traceback for a typing error teaches users to ignore messages."""
    result = CliRunner().invoke(app, ["run", str(tmp_path / "none.yaml")])

    assert result.exit_code == 2
    assert result.stderr.startswith("everstep: ")
    assert "does not exist" in result.stderr
    assert "Traceback" not in result.output


def test_all_problems_of_a_configuration_reach_the_user(tmp_path: Path) -> None:
    """They are collected far below the command line and must not be cut to the first."""
    path = tmp_path / "bad.yaml"
    path.write_text("run: {directory: x}\nworkers: {max: 0}\ntrian: {}\n", encoding="utf-8")

    result = CliRunner().invoke(app, ["run", str(path)])

    assert result.exit_code == 2
    assert "bad.yaml:2: workers.max" in result.stderr
    assert "bad.yaml:3: trian: is no section; did you mean train?" in result.stderr


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path: Path) -> None:
    """Every command that takes a run directory is given a wrong one some day."""
    for command in ("status", "report", "replay", "stop"):
        result = CliRunner().invoke(app, [command, str(tmp_path)])

        assert result.exit_code == 2, command
        assert "holds no run" in result.stderr, command


def test_a_campaign_of_no_histories_is_no_success() -> None:
    """A script that computes the number wrongly must not read that nothing was violated."""
    for number in ("0", "-5"):
        result = CliRunner().invoke(app, ["simulate", "--histories", number])

        assert result.exit_code == 2
        assert "violations" not in result.stdout


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_who_ends_a_command_is_told_what_becomes_of_the_run(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word nobody knows whether something goes on in the background."""
    before = signal.getsignal(signal.SIGTERM)
    # A shell that has put the tests into the background may have them ignore it.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        with pytest.raises(typer.Exit) as caught, _ending("the run goes on"):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, interrupt)

    assert caught.value.exit_code == code
    assert capsys.readouterr().err == f"everstep: ended by {number.name}: the run goes on\n"
    assert signal.getsignal(signal.SIGTERM) is before
