"""The commands as a person uses them: in processes of their own, judged by what they print."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config import RunConfig
from orchestrator.shell import RunNames, run_id
from tests.support.reach import PACED
from tests.support.run_command import ACT_S_MAX, EVERSTEP, everstep, last_step, wait

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


def test_killed_driver_does_not_stop_the_run_and_a_command_does(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """A laptop that closes must not cost a training; a second driver attaches and sees its end.

    It does so wherever it would have the run itself. What was trained is kept: the last step of
    a stopped run is in storage, and the run goes on from there when it is run again.
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
    planned = everstep("plan", directory, "--lose", node[:12], "--json")
    unknown = everstep("plan", directory, "--lose", "nowhere")
    other = everstep("run", path, "train.steps=7", "--json")
    anywhere = _write(config, tmp_path, None)
    shown = tmp_path / "second.txt"
    with shown.open("w") as stderr:
        second = subprocess.Popen(
            [*EVERSTEP, "run", anywhere, "--json"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    wait(lambda: "running" in shown.read_text(), "the second driver follows the run")
    wait(lambda: last_step(directory) > status["step"] + 3, "the run goes on")
    stopped = everstep("stop", directory)
    output, _ = second.communicate(timeout=ACT_S_MAX)

    _check_keys(status)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["lost_nodes"], plan["workers_before"], plan["workers_after"]) == ([node], 4, 2)
    assert sum(plan["bytes_by_source"].values()) > 0
    assert unknown.returncode == 2
    assert "is no node of the run" in unknown.stderr
    assert stopped.returncode == 0, stopped.stderr
    assert second.returncode == 0, shown.read_text()
    summary = json.loads(output)
    assert (summary["outcome"], summary["attempts"]) == ("stopped", 1)
    manifest = f"checkpoints/step-{summary['steps']:08d}/manifest.json"
    assert Path(directory, manifest).exists()
    assert other.returncode == 2
    assert "train.steps: 7 here, 100000 in the run" in other.stderr
    wait(lambda: not shared.exists(), "a run that is over is in nobody's memory")
    _assert_goes_on(path, directory, summary)


def test_stop_is_told_to_the_controller_after_one_that_is_stopped(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """It came to nobody then: the run went on, and the command said that nobody answers."""
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
    assert "it is ended after 20 s and the next one is told" in stopped.stderr
    assert json.loads(summary.read_text())["outcome"] == "stopped"


def _assert_goes_on(path: str, directory: str, stopped: dict[str, Any]) -> None:
    """Run a stopped run again, on half the workers and a little longer: it ends like one run."""
    changed = everstep("run", path, "train.seed=5")
    total = stopped["steps"] + 4
    again = everstep("run", path, f"train.steps={total}", "workers.max=2", "--json")
    over = everstep("run", path, f"train.steps={total}", "--json")

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
    replayed = everstep("replay", directory, "--json")
    assert json.loads(replayed.stdout)["same_decisions"] is True
    reported = everstep("report", directory)
    assert reported.returncode == 0, reported.stderr


def test_the_doctor_asks_every_node(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Storage that only the driver sees is a checkpoint that no other node can load."""
    path = _write(make_config(), tmp_path, nodes.address)

    well = everstep("doctor", path, "--json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"cluster.metrics_port={taken.getsockname()[1]}"
        ill = everstep("doctor", path, "run.directory=memory://run", port, "--json")

    assert well.returncode == 0, well.stdout + well.stderr
    asked = json.loads(well.stdout)["nodes"]
    assert len(asked) == len({facts["node"] for facts in asked}) >= 3
    assert [facts["holds_workers"] for facts in asked].count(False) == 1, "the head is asked too"
    assert all(facts["copies_past_caches"] for facts in asked), "nodes of ours have it set"
    assert ill.returncode == 1
    findings = {row["about"]: row for row in json.loads(ill.stdout)["findings"]}
    wrong = [about for about, row in findings.items() if row["level"] == "fail"]
    assert wrong == ["storage"]
    assert all(facts["node"] in findings["storage"]["message"] for facts in asked)
    assert findings["cluster.metrics_port"]["level"] == "warn"


def _answers(port: int) -> bool:
    """Return whether something listens at a port of this machine."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_ray_job_submit_runs_everstep_unchanged(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The job's driver finds the cluster it runs on by itself: nothing names an address.

    Ray brings no file along that .gitignore names.
    """
    config = make_config(
        train__steps=3, train__warmup_steps=2, workers__max=1, workers__standby_per_node=0
    )
    project = tmp_path / "project"
    project.mkdir()
    document = yaml.safe_load(config.to_yaml())
    document["cluster"].pop("address", None)
    for name in ("job.yaml", "mine.yaml"):
        (project / name).write_text(yaml.safe_dump(document))
    (project / ".gitignore").write_text("mine.yaml\n")
    outputs: list[str] = []
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    head = [f"{binaries}/ray", "start", "--head", "--block", "--num-cpus=2", "--port=0"]
    head += ["--dashboard-port=28265", "--include-dashboard=true"]
    # The job agent's usual port is taken by the nodes of the other tests.
    head += ["--dashboard-agent-listen-port=28366", "--temp-dir=/tmp/everstep-job"]
    server = subprocess.Popen(
        head, env=environment, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        submit = [f"{binaries}/ray", "job", "submit", "--address", "http://127.0.0.1:28265"]
        submit += ["--working-dir", str(project), "--"]
        submit += ["sh", "-c", "everstep run mine.yaml; everstep run job.yaml"]

        def submitted() -> bool:
            assert server.poll() is None, "the head did not start"
            answer = subprocess.run(
                # It waits for the end of the job.
                submit,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * ACT_S_MAX,
            )
            outputs.append(answer.stdout)
            if answer.returncode:
                # The dashboard comes up some seconds after the head, the job agent later still.
                is_early = ("Failed to connect", "No available agent")
                output = answer.stderr + answer.stdout
                assert any(words in output for words in is_early), output
            return answer.returncode == 0

        # A submission that fails costs seconds of a processor.
        wait(lambda: _answers(28265), "the dashboard is up", server)
        wait(submitted, "the cluster takes the job")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(ACT_S_MAX)

    summary = json.loads(Path(config.run.directory, "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("completed", 3)
    assert "mine.yaml cannot be read" in outputs[-1]
    assert "leaves out what .gitignore names" in outputs[-1]
