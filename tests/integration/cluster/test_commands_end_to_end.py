"""The commands as a person uses them: in processes of their own, judged by what they print."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from orchestrator.config import RunConfig
from orchestrator.shell import RunNames, run_id
from orchestrator.shell.serve import targets_path
from tests.support.reach import PACED
from tests.support.run_command import (
    ACT_S_MAX,
    EVERSTEP,
    command_for,
    everstep,
    everstep_each,
    last_step,
    wait,
)

pytestmark = pytest.mark.timeout(900)


def _write(config: RunConfig, tmp_path: Path, address: str | None) -> str:
    document = yaml.safe_load(config.to_yaml())
    document["cluster"]["address"] = address
    path = tmp_path / ("config.yaml" if address else "anywhere.yaml")
    path.write_text(yaml.safe_dump(document))
    return str(path)


def _check_keys(status: dict[str, Any]) -> None:
    assert {"phase", "attempt", "step", "loss", "layout", "workers", "nodes"} <= set(status)
    assert {"pending_capacity", "redundancy"} <= set(status)
    assert {"rank", "node", "pid", "state", "last_heartbeat_s"} <= set(status["workers"][0])
    assert {"node", "raylet_pid", "state"} <= set(status["nodes"][0])


@pytest.mark.chaos
def test_killed_driver_does_not_stop_the_run_and_a_command_does(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A laptop that closes must not cost a training; a second driver attaches and sees its end.

    It does so wherever it would run itself. No step is lost: the last step of a stopped run is in
    storage, and the same command resumes from there.
    """
    config = make_config(
        train__steps=100_000, train__warmup_steps=2, workers__standby_per_node=0, **PACED
    )
    path = _write(config, tmp_path, nodes.address)
    driver = subprocess.Popen([*EVERSTEP, "run", path, "--json"], stdout=subprocess.DEVNULL)
    directory = config.run.directory
    wait(lambda: last_step(directory) >= 3, "the run trains")
    shared = Path(RunNames(run_id(directory)).shared_directory("node")).parent
    assert shared.is_dir()

    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    status = json.loads(everstep("status", directory, "--json").stdout)
    node = status["nodes"][1]["node"]
    planned, unknown, other = everstep_each(
        ("plan", directory, "--lose", node[:12], "--json"),
        ("plan", directory, "--lose", "nowhere"),
        ("run", path, "train.steps=7", "--json"),
    )
    anywhere = _write(config, tmp_path, None)
    shown = tmp_path / "second.txt"
    with shown.open("w") as stderr:
        second = subprocess.Popen(
            [*EVERSTEP, "run", anywhere, "--json"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    wait(lambda: "trains on" in shown.read_text(), "the second driver follows the run")
    wait(lambda: last_step(directory) > status["step"] + 3, "the run goes on")
    stopped = everstep("stop", directory)
    output, _ = second.communicate(timeout=ACT_S_MAX)

    _check_keys(status)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["lost_nodes"], plan["workers_before"], plan["workers_after"]) == ([node], 4, 2)
    assert sum(plan["bytes_by_source"].values()) > 0
    assert unknown.returncode == 2
    assert "is not a node of the run" in unknown.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert second.returncode == 0, shown.read_text()
    summary = json.loads(output)
    assert (summary["outcome"], summary["attempts"]) == ("stopped", 1)
    manifest = f"checkpoints/step-{summary['steps']:08d}/manifest.json"
    assert Path(directory, manifest).exists()
    assert other.returncode == 2
    assert "train.steps: 7 here, 100000 in the run" in other.stderr
    wait(lambda: not shared.exists(), "a run that is over is in no memory")
    _assert_goes_on(path, directory, summary)


@pytest.mark.chaos
def test_the_controller_after_a_stopped_one_gets_the_stop(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The request was lost: the run trained on, and the command reported no answer."""
    config = make_config(
        train__steps=100_000, recovery__patience=6, workers__max=1, workers__standby_per_node=0,
        **PACED,
    )  # fmt: skip
    path, directory = _write(config, tmp_path, nodes.address), config.run.directory
    begun = everstep("run", path, "--detach")
    assert begun.returncode == 0, begun.stderr
    wait(lambda: last_step(directory) >= 2, "the run trains")
    contact = json.loads(Path(directory, "controller.json").read_text())

    strange = everstep("stop", directory, "--token", "0123")
    os.kill(contact["pid"], signal.SIGSTOP)
    stopped = everstep("stop", directory)
    summary = Path(directory, "summary.json")
    if stopped.returncode:
        everstep("stop", directory)
    wait(summary.exists, "the run is over")

    assert strange.returncode == 2
    assert "that is not the token of the run" in strange.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert "a stopped controller is restarted after 20 s" in stopped.stderr
    assert json.loads(summary.read_text())["outcome"] == "stopped"


def _assert_goes_on(path: str, directory: str, stopped: dict[str, Any]) -> None:
    """Run a stopped run again, on half the workers and a little longer: it ends like one run."""
    changed = everstep("run", path, "train.seed=5")
    total = stopped["steps"] + 4
    again = everstep("run", path, f"train.steps={total}", "workers.max=2", "--json")
    over, replayed, reported = everstep_each(
        ("run", path, f"train.steps={total}", "--json"),
        ("replay", directory, "--json"),
        ("report", directory),
    )

    assert changed.returncode == 2
    assert "train.seed: 5 here, 0 in the run" in changed.stderr
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)
    assert (summary["outcome"], summary["steps"]) == ("completed", total)
    stop, resume = summary["incidents"][:2]
    assert (stop["kind"], resume["kind"], resume["lost_steps"]) == ("stop", "resume", 0)
    assert resume["sources"].keys() == {"storage"}
    lines = Path(directory, "metrics/rank0.jsonl").read_text().splitlines()
    workers = {line["step"]: line["num_workers"] for line in map(json.loads, lines)}
    assert list(workers) == list(range(1, total + 1))
    assert workers[stopped["steps"]] == 4
    assert {workers[total - back] for back in range(4)} <= {1, 2}
    assert over.returncode == 2
    assert f"all {total} steps are done" in over.stderr
    assert json.loads(replayed.stdout)["same_decisions"] is True
    assert reported.returncode == 0, reported.stderr


def test_the_doctor_asks_every_node(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Storage that only the driver sees is a checkpoint that no other node can load."""
    path = _write(make_config(), tmp_path, nodes.address)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"cluster.metrics_port={taken.getsockname()[1]}"
        ill = everstep("doctor", path, "run.directory=memory://run", port, "--json")

    assert ill.returncode == 1, ill.stdout + ill.stderr
    asked = json.loads(ill.stdout)["nodes"]
    assert len(asked) == len({facts["node"] for facts in asked}) >= 3
    assert [facts["holds_workers"] for facts in asked].count(False) == 1, "the head is asked too"
    assert all(facts["copies_past_caches"] for facts in asked), "nodes of ours have it set"
    findings = {row["about"]: row for row in json.loads(ill.stdout)["findings"]}
    wrong = [about for about, row in findings.items() if row["level"] == "fail"]
    assert wrong == ["storage"]
    assert all(facts["node"] in findings["storage"]["message"] for facts in asked)
    assert findings["cluster.metrics_port"]["level"] == "warn"


@pytest.mark.chaos
def test_a_run_that_is_ended_by_force_leaves_no_process(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """On a cluster that lives on, its workers would keep what others wait for."""
    config = make_config(
        train__steps=100_000,
        workers__max=1,
        workers__standby_per_node=0,
        cluster__local_nodes=1,
        snapshot__every_steps=0,
        **PACED,
    )
    with command_for(config, tmp_path) as command:
        process = command.start("--address", nodes.address)
        namespace = RunNames(run_id(command.directory)).namespace
        target = targets_path(run_id(command.directory))
        assert target.exists()

        forced = everstep("stop", command.directory, "--force")
        _, errors = process.communicate(timeout=60)

        assert forced.returncode == 0, forced.stderr
        assert process.returncode == 3, errors
        assert f"the run in {command.directory} was ended by force" in errors
        actors = [
            actor
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == namespace
        ]
        assert actors == []
        assert not target.exists(), "Prometheus looks for it for ever"
        wait(lambda: _free_cpus() == 4, "its room is free again")


def _free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))
