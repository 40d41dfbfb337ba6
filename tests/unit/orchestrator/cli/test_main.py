import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.exit_codes import code_of_outcome
from orchestrator.cli.main import _edge, _finish, _is_final, app
from orchestrator.config import load
from orchestrator.errors import (
    CapacityError,
    ConfigError,
    JournalCorruptError,
    RunNotFoundError,
)
from tests.support.checkpoints import save, small_state
from tests.support.run_directories import write_run
from ucp_core.errors import ChecksumMismatchError, StorageError
from ucp_core.storage import LocalStore


def test_a_result_is_printed_as_text_and_as_json(tmp_path: Path) -> None:
    """A command that works in silence passes every test of its exit code."""
    write_run(tmp_path)
    text = CliRunner().invoke(app, ["report", str(tmp_path)])
    machine = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])

    assert text.stdout == f"report: {tmp_path}/report.html\n"
    assert json.loads(machine.stdout) == {"report": f"{tmp_path}/report.html"}


def test_the_end_of_a_run_is_printed_in_sentences_with_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen raw keys, the digest of the weights first, hid where the checkpoint is."""
    monkeypatch.chdir(tmp_path)
    text = "run: {directory: first}\nworkers: {max: 2}\ntrain: {steps: 400}\n"
    save(LocalStore(), small_state(), step=200, root=str(tmp_path / "first/checkpoints"))
    (tmp_path / "first/config.yaml").write_text(load(text).to_yaml())
    summary: dict[str, object] = {
        "weights_digest": None,
        "outcome": "stopped",
        "reason": "everstep stop",
        "steps": 203,
        "attempts": 1,
        "lost_steps": 0,
        "wall_s": 3725.2,
        "goodput": 0.7814239227056647,
        "final_loss": 2.31519,
        "cost_usd": 0.0,
        "incidents": [],
        "phases_s": {},
        "parts_s": {"steps": 2911.0, "saving": 10.0, "start": 559.0, "recovery": 245.2},
    }

    _finish(summary, str(tmp_path / "first"), as_json=False)
    stopped = capsys.readouterr()
    _finish(summary, str(tmp_path / "first"), as_json=True)
    machine = capsys.readouterr()
    complete = {**summary, "outcome": "completed", "steps": 400, "attempts": 3, "cost_usd": 1.255}
    complete |= {"report": f"{tmp_path}/first/report.html", "best": {"step": 180, "loss": 1.5}}
    _finish(complete, str(tmp_path / "first"), as_json=False)

    assert stopped.err == (
        "first was stopped after step 203 of 400, 1 h 2 min and 1 attempt: everstep stop; "
        "the same command resumes from there.\n"
    )
    assert stopped.out.splitlines() == [
        "Loss 2.3152, 0 steps lost, goodput 78% (start 15%, recovery 7%).",
        "Its last checkpoint is first/checkpoints/step-00000200.",
        "To draw the curve and all incidents: everstep report first",
        "To use the weights: everstep export first --to DST --format huggingface",
    ]
    assert json.loads(machine.out) == summary
    assert capsys.readouterr().out.splitlines() == [
        "first is complete after step 400 of 400, 1 h 2 min and 3 attempts.",
        "Loss 2.3152, 0 steps lost, goodput 78% (start 15%, recovery 7%), cost $1.25.",
        "Its last checkpoint is first/checkpoints/step-00000200; the best one is of step 180.",
        "The report is first/report.html.",
        "To use the weights: everstep export first --to DST --format huggingface",
    ]


def test_commands_that_are_advised_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run directory may have a space in its name."""
    monkeypatch.chdir(tmp_path)
    save(LocalStore(), small_state(), step=2, root=str(tmp_path / "my run/checkpoints"))
    text = "run: {directory: my run}\nworkers: {max: 2}\ntrain: {steps: 4}\n"
    (tmp_path / "my run/config.yaml").write_text(load(text).to_yaml())
    facts = {"outcome": "completed", "reason": "", "steps": 4, "attempts": 1, "lost_steps": 0}
    summary = {**facts, "wall_s": 1.0, "goodput": 1.0, "cost_usd": 0.0, "phases_s": {}}

    _finish(summary, str(tmp_path / "my run"), as_json=False)

    advised = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all("my run" in line for line in advised if "everstep" in line)
    assert sum("everstep" in line for line in advised) == 2


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
    assert "bad.yaml:3: trian: is not a section; did you mean train?" in result.stderr


def test_a_run_that_is_over_says_so_without_ray(tmp_path: Path) -> None:
    """A start of Ray takes ten seconds or more, after which there was nothing to do."""
    write_run(tmp_path / "run", steps=60)
    config = tmp_path / "run.yaml"
    config.write_text(f"run: {{directory: {tmp_path}/run}}\nworkers: {{max: 1}}\n")
    program = (
        "import sys\nfrom orchestrator.cli.main import app\n"
        f"try: app(['run', {str(config)!r}, 'train.steps=60'])\n"
        "except SystemExit as end: print(end.code, 'ray' in sys.modules)"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert ended.stdout.splitlines()[-1] == "2 False"
    assert "train.steps: all 60 steps are done; raise it to train on" in ended.stderr


@pytest.mark.parametrize("word", ["resume", "statsu"])
def test_another_word_for_a_command_names_the_one_that_is_meant(word: str) -> None:
    """The command that started a run resumes it, which is not obvious."""
    result = CliRunner().invoke(app, [word, "run.yaml"], env={"NO_COLOR": "1"})

    assert result.exit_code == 2
    assert f"Did you mean '{'run' if word == 'resume' else 'status'}'?" in result.output


def test_a_name_close_to_that_of_a_configuration_is_suggested(tmp_path: Path) -> None:
    """An example of ours, or a file beside the one that is missing."""
    (tmp_path / "train.yaml").write_text("run: {directory: x}\n")

    example = CliRunner().invoke(app, ["run", "local/smal"])
    beside = CliRunner().invoke(app, ["run", str(tmp_path / "train.yml")])

    assert (example.exit_code, beside.exit_code) == (2, 2)
    assert "did you mean local/small?" in example.stderr
    assert f"did you mean {tmp_path}/train.yaml?" in beside.stderr


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path: Path) -> None:
    """Every command that takes a run directory is given a wrong one some day."""
    to = ["--to", str(tmp_path / "out")]
    for command in ("status", "report", "replay", "stop", "logs", "plan", "export"):
        options = to if command == "export" else []
        result = CliRunner().invoke(app, [command, str(tmp_path), *options])

        assert result.exit_code == 2, command
        assert "holds no run" in result.stderr, command


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "8"], "--gpus 8: write nodes x GPUs of each, as 8x8"),
        (["--gpus", "8x8", "--gpu", "h10"], "--gpu h10: the known ones are b200, h200, h100"),
        (["--gpus", "8x8", "--model", "gpt"], "--model gpt: the known ones are tiny, small"),
        (["--gpus", "8x8", "run.script=train.py"], "name its sizes by --model llama-8b"),
    ],
)
def test_hardware_that_cannot_be_planned_for_is_refused(options: list[str], told: str) -> None:
    """The message says what to write instead."""
    result = CliRunner().invoke(app, ["plan", "local/small", *options])

    assert result.exit_code == 2, result.output
    assert told in result.stderr


def test_layouts_of_hardware_that_is_not_here_are_compared() -> None:
    """As a table for people, and as JSON for programs, with what follows when a node is lost."""
    train = ["train.global_batch=512", "train.micro_batch=1", "data.sequence_length=8192"]
    train += ["train.deterministic=false"]
    command = ["plan", "local/small", *train, "train.precision=bf16", "--gpus", "8x8"]
    command += ["--model", "llama-70b", "--recompute"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)

    assert shown.exit_code == 0, shown.output
    assert "70.6 B parameters, 4,194,304 tokens a step, 8 x 8 h100" in shown.stdout
    first = document["layouts"][0]
    assert first["fits"]
    assert first["why"].startswith("the fastest ")
    assert f"without one node: {document['after_loss']['layout']}, " in shown.stdout
    assert "a node is lost about every 33 days; until one is back (say 4 hours), " in shown.stdout

    command[command.index("llama-70b")] = "mixtral-8x7b"
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    assert "46.7 B parameters" in shown.stdout
    assert "x ep=8 " in shown.stdout


PLAN = ["train.deterministic=false", "train.global_batch=1024", "train.micro_batch=1"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "70b", "parallel.tp=8"], "kept: parallel.tp=8"),
        (["--model", "70b", "parallel.fixed=[pp]"], "kept: parallel.pp=1"),
        (["--model", "405b", "model.num_layers=128"], "412.2 B parameters"),
        (["--model", "mixtral-8x7b", "model.num_layers=16"], "23.5 B parameters"),
        (["--model", "70b", "parallel.pp=5"], "parallel.pp=5"),
        (["--model", "deepseek-v3"], "671.0 B parameters"),
        (
            ["--model", "8b", "train.deterministic=true", "train.recheck=100"],
            "adds 1 micro-batch per 100 steps to each worker, 0.062 % of a run with 16",
        ),
    ],
    ids=str,
)
def test_a_plan_is_for_the_model_and_the_degrees_that_are_named(
    options: list[str], told: str
) -> None:
    """The shape of the settings' small model decides nothing, nor does its number of workers."""
    gpus = "5x8" if "parallel.pp=5" in options else "8x8"
    result = CliRunner().invoke(app, ["plan", "local/small", *PLAN, "--gpus", gpus, *options])
    assert result.exit_code == 0, result.output
    assert told in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "70b", "parallel.tp=16"], "16 does not divide model.num_kv_heads=8"),
        (["--model", "405b", "parallel.pp=127"], "127 is more than model.num_layers=126"),
        (["--model", "mixtral-8x7b", "parallel.ep=16"], "16 does not divide the 8 experts"),
        (["--model", "8b", "parallel.ep=2"], "has no experts"),
        (["--model", "70b", "parallel.tp=8", "parallel.pp=3"], "in multiples of 24, and there are"),
    ],
    ids=str,
)
def test_degrees_that_the_model_or_the_gpus_cannot_have_are_refused(
    options: list[str], told: str
) -> None:
    """By the shape of ``--model``: a plan without the wish would be one for another question."""
    result = CliRunner().invoke(app, ["plan", "local/small", *PLAN, "--gpus", "8x8", *options])
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split())


def test_a_topology_shows_what_orders_and_paths_gain() -> None:
    """Racks in turn cross the uplinks twice as often; one path of two takes twice as long."""
    command = ["plan", "local/small", "--gpus", "4x8", "--model", "llama-8b"]
    command += ["topology.racks={a: [n1, n3], b: [n2, n4]}", "topology.uplink_gbit_s=10"]
    command += ["topology.spines=2", "snapshot.tolerance=1"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    traffic = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["traffic"]

    assert shown.exit_code == 0, shown.output
    turn, near = (row["took_s"] for row in traffic["rows"][:2])
    assert traffic["gain"] == pytest.approx(turn / near)
    assert traffic["gain"] >= 2.0
    assert traffic["order"] == ["n1", "n3", "n2", "n4"]
    assert "out of rack a, rail 0, spine 0" in shown.stdout
    assert "times as fast with ranks on n1, n3, n2, n4" in shown.stdout

    wrong = CliRunner().invoke(app, [*command[:2], "--gpus", "8x8", *command[4:]])
    assert wrong.exit_code == 2
    assert "topology.racks names 4 nodes, and --gpus 8: name as many" in wrong.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_signal_ends_every_command_with_the_documented_code(
    number: signal.Signals, code: int
) -> None:
    """A script that waits for a command must not take Ctrl-C for a failure of the run."""
    # In the background of a shell, or under nohup, tests ignore one of these.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}

    try:
        with pytest.raises(typer.Exit) as caught:
            _edge(lambda: signal.raise_signal(number))()
        assert {one: signal.getsignal(one) for one in before} == before
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGHUP, hangup)

    assert caught.value.exit_code == code


def test_the_exit_codes_are_in_the_help_once_for_all_commands() -> None:
    """A script's author looks there; what each command says on its own differs some day."""
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout

    for line in ("0  success", "2  wrong usage", "3  no cluster", "5  the storage does not"):
        assert line in text


def test_the_version_is_printed() -> None:
    """The first question to anyone who reports a problem."""
    assert CliRunner().invoke(app, ["--version"]).stdout == "everstep 0.1.0\n"


@pytest.mark.parametrize(
    ("outcome", "code"), [("completed", 0), ("stopped", 0), ("failed", 1), ("no_capacity", 3)]
)
def test_a_supervisor_learns_from_the_exit_code_whether_a_restart_helps(
    outcome: str, code: int
) -> None:
    """A run without machines is worth a restart; one with a bug in its script is not."""
    assert code_of_outcome(outcome) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (RunNotFoundError("x"), 2),
        (CapacityError("x"), 3),
        (JournalCorruptError("x"), 4),
        (StorageError("x"), 5),
        (ChecksumMismatchError("x"), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_damage_and_refusal_are_no_bad_input(error: Exception, code: int) -> None:
    """A damaged journal sent its owner to look for a mistake in the configuration."""

    def fail() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        _edge(fail)()

    assert caught.value.exit_code == code


def test_a_signal_that_ray_hides_keeps_its_number() -> None:
    """Ray raises a bare KeyboardInterrupt for any signal that ends `ray.get`."""

    def wait_in_ray() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(typer.Exit) as caught:
        _edge(wait_in_ray)()

    assert caught.value.exit_code == 143


@pytest.mark.parametrize("command", ["run", "watch", "doctor"])
def test_the_cluster_of_an_option_counts_when_the_settings_are_checked(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Simulated nodes have no spot market, and were checked instead of the cluster."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{directory: {tmp_path}/run}}\nworkers: {{max: 1}}\ncapacity: [{{spot: true}}]\n"
        "data: {source: /nowhere/*.txt}\n",  # ends before anybody looks for the cluster
        encoding="utf-8",
    )
    given = [str(path), "--address", "127.0.0.1:1"]

    ended = CliRunner().invoke(app, [command, *given])
    text = ended.output + capfd.readouterr().err  # `watch` begins a process

    assert "simulated nodes" not in text
    assert ("data.source" if command != "doctor" else "no Ray cluster answers") in text


def test_only_a_text_that_is_wrong_ends_a_watch_after_its_first_try(tmp_path: Path) -> None:
    """Storage that is away looks like a mistake in the configuration that names it."""
    path = tmp_path / "run.yaml"
    path.write_text("run: {directory: x}\nworkers: {max: 1}\n", encoding="utf-8")

    assert _is_final(str(path), [], 2, 0)
    assert not _is_final(str(path), [], 2, 1)
    assert not any(_is_final(str(path), [], code, 0) for code in (1, 3, 5, -9))
    assert _is_final(str(path), [], 4, 1)
    assert _is_final(str(path), ["workers.max=none"], 2, 1)
    path.unlink()  # its storage is away, too
    assert not _is_final(str(path), [], 2, 1)


def test_a_file_is_not_blamed_for_what_stands_beside_it(tmp_path: Path) -> None:
    """People look for the fault in the file that is named first."""
    path = tmp_path / "good.yaml"
    path.write_text("run: {directory: x}\nworkers: {max: 2}\n", encoding="utf-8")
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: {directory: x}\nworkers: {max: 0}\n", encoding="utf-8")

    beside = CliRunner().invoke(app, ["run", str(path), "train.nope=3"])
    both = CliRunner().invoke(app, ["run", str(bad), "train.nope=3"])

    assert beside.stderr.startswith("everstep: the command line has 1 problem:\n")
    assert both.stderr.startswith("everstep: bad.yaml and the command line have 2 problems:\n")


def test_commands_that_few_runs_need_stand_in_a_part_of_their_own() -> None:
    """Eighteen commands in one list hide the five that everybody uses."""
    shown = CliRunner().invoke(app, ["--help"], env={"NO_COLOR": "1", "COLUMNS": "100"}).stdout

    commands, tools = shown.split(" Tools ")
    for name in ("schema", "replay", "convert", "demo"):
        assert f"\n│ {name} " in tools
        assert f"\n│ {name} " not in commands
    for name in ("run", "status", "open", "stop", "export"):
        assert f"\n│ {name} " in commands
