import re
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, load, run_preflight
from orchestrator.config.preflight import worker_memory_bytes
from orchestrator.errors import ConfigError


def _config(tmp_path: Path, *overrides: str) -> RunConfig:
    text = f"run: {{directory: '{tmp_path / 'run'}'}}\nworkers: {{max: 4}}\n"
    return load(text, ["cluster.local_nodes=2", *overrides])


def _paths(config: RunConfig) -> list[str]:
    return [problem.path for problem in run_preflight(config)]


def test_a_good_configuration_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The check writes a file: whoever mistyped the directory must not find it made."""
    config = _config(tmp_path / "home")

    assert run_preflight(config) == []
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "home" / "run").mkdir(parents=True)
    assert run_preflight(config) == []
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "run"]


def test_storage_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Otherwise the first checkpoint finds out, after minutes of training."""
    (tmp_path / "run").write_text("a file where a directory is to be", encoding="utf-8")

    problems = run_preflight(_config(tmp_path))

    assert [problem.path for problem in problems] == ["run.directory"]
    assert "cannot be written" in problems[0].message


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """Data, script and tokenizer are looked for by different parts of the code."""
    config = _config(
        tmp_path,
        f"data.source={tmp_path}/nothing/*.txt",
        f"run.script={tmp_path}/train.py",
        f"data.tokenizer={tmp_path}/tokenizer.json",
        f"run.init_from={tmp_path}/model",
    )

    assert _paths(config) == ["data.source", "run.script", "data.tokenizer", "run.init_from"]


@pytest.mark.parametrize("script", ["../train.py", "train.py", "/srv/mine/train.py"])
def test_a_job_says_which_files_it_brings(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only .gitignore was named, and nothing for a path of the machine that submitted the job."""
    package = tmp_path / "runtime_resources/working_dir_files/_ray_pkg_0"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    (problem,) = run_preflight(_config(tmp_path, f"run.script={script}"))

    assert problem.path == "run.script"
    assert re.search(r"--working-dir only.*\.gitignore.*excludes", problem.message)


def test_a_script_that_is_no_python_is_refused_with_its_line(tmp_path: Path) -> None:
    """The workers would find it out, each of them, when all has been started."""
    script = tmp_path / "train.py"
    script.write_text("import math\ndef train(:\n")
    (problem,) = run_preflight(_config(tmp_path, f"run.script={script}"))
    script.write_text("import math\n")

    assert (problem.path, problem.message) == ("run.script", f"{script}:2: invalid syntax")
    assert run_preflight(_config(tmp_path, f"run.script={script}")) == []


def test_what_the_text_and_what_the_world_refuses_come_at_once(tmp_path: Path) -> None:
    """A typing error that hides an unreadable file makes a user start a run twice."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    text = f"""\
run: {{directory: '{tmp_path}/file/run'}}
workers: {{max: 4}}
data: {{source: '{tmp_path}/nothing/*.txt'}}
model: {{preset: 8b}}
cluster: {{memory_gib_per_worker: 1}}
train: {{stpes: 3}}
"""

    with pytest.raises(ConfigError) as caught:
        load(text, look=run_preflight)

    places = [problem.split(": ")[:2] for problem in caught.value.facts["problems"]]
    assert places == [
        ["text:6", "train.stpes"],
        ["text:1", "run.directory"],
        ["text:3", "data.source"],
        ["text:2", "workers.min"],
    ]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("workers: {max: 2}\n", ["run"]),
        ("run: x\n", ["run", "workers"]),
        ("run: {directory: [x]}\nworkers: {max: 2}\n", ["run.directory"]),
        ("run: {arguments: [x]}\nworkers: {max: two}\n", ["run.directory", "workers.max"]),
    ],
    ids=["no directory", "no section", "no text", "no numbers"],
)
def test_only_keys_that_were_written_are_checked_against_the_world(
    text: str, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for a broken key would be used, or refused, as if it were meant."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        load(text, ["model.preset=8b", "cluster.memory_gib_per_worker=1"], look=run_preflight)

    lines = caught.value.facts["problems"]
    found = [path for line in lines for path in line.split(": ")[:2] if "text" not in path]
    assert found[: len(paths)] == paths
    assert not [line for line in lines if "cannot be written" in line or "GiB" in line]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "share", "told"),
    [
        ((), 1.0, "torch finds 0 GPUs on this machine; write 0"),
        (("0",), 0.5, "torch finds 1 GPUs on this machine; write 0.25"),
        (("0", "1", "2"), 1.0, "torch finds 3 GPUs on this machine; write 0.5"),
        (("0",), 0.25, ""),
        (("0", "1", "2", "3"), 1.0, ""),
    ],
)
def test_simulated_nodes_have_no_more_than_the_gpus_of_this_machine(
    gpus: tuple[str, ...], share: float, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that Ray has no room for would be waited for without end."""
    monkeypatch.setattr("orchestrator.config.preflight.gpus_here", lambda: gpus)
    config = _config(tmp_path, f"cluster.gpus_per_worker={share}")

    messages = [problem.message for problem in run_preflight(config)]

    assert len(messages) == bool(told)
    assert all(told in message for message in messages)


def test_min_workers_at_which_the_model_does_not_fit_are_refused(tmp_path: Path) -> None:
    """It fits at the start with all workers, and would die at the first loss of one."""
    config = _config(
        tmp_path,
        "model.preset=8b",
        "workers.max=16",
        "cluster.memory_gib_per_worker=40",
        "train.precision=bf16",
    )

    problems = run_preflight(config)

    assert [problem.path for problem in problems] == ["workers.min"]
    assert "4 would be enough" in problems[0].message
    assert _paths(config.model_copy(update={"workers": _min(config, 4)})) == []


def test_a_model_that_never_fits_gets_no_number_of_workers(tmp_path: Path) -> None:
    """ "Raise workers.min" would be wrong advice where activations alone are too much."""
    config = _config(tmp_path, "model.preset=8b", "cluster.memory_gib_per_worker=1")

    assert "even workers.max=4 workers are too few" in run_preflight(config)[0].message


def test_memory_is_not_judged_where_it_is_not_known(tmp_path: Path) -> None:
    """A cluster's nodes are not this machine: refusing by its memory would refuse good runs."""
    config = _config(tmp_path, "model.preset=8b", "cluster.address=10.0.0.1:6379")

    assert _paths(config) == []


def test_sharding_divides_the_state_and_only_the_state(tmp_path: Path) -> None:
    """Activations and gathered parameters stay whole on each worker, however many there are."""
    config = _config(tmp_path, "model.preset=1b")
    parameters = 1_235_814_400  # Llama 3.2 1B, as published

    two, four = worker_memory_bytes(config, 2), worker_memory_bytes(config, 4)

    assert two - four == pytest.approx(parameters * 16 / 4, rel=1e-6)


def test_replicas_do_not_divide_the_state(tmp_path: Path) -> None:
    """4 workers in 2 replicas shard in halves."""
    sharded = _config(tmp_path, "model.preset=1b")
    replicated = _config(tmp_path, "model.preset=1b", "parallel.dp_replicate=2")

    assert worker_memory_bytes(replicated, 4) == worker_memory_bytes(sharded, 2)


def _min(config: RunConfig, count: int) -> object:
    return config.workers.model_copy(update={"min": count})


def test_a_logger_whose_package_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller would find it out after the user has left."""
    config = _config(tmp_path, "logging.wandb.project=p", "logging.tensorboard=true")
    assert run_preflight(config) == []

    monkeypatch.setattr(
        "orchestrator.config.preflight.find_spec", lambda name: None if name == "wandb" else name
    )
    [problem] = run_preflight(config)

    assert problem.path == "logging.wandb"
    assert problem.message == (
        "the package wandb is not installed; pip install 'everstep[loggers]'"
    )
