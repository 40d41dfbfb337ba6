"""``ray job submit`` on a cluster that ``ray start`` has made."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from orchestrator.config import RunConfig
from tests.support.run_command import ACT_S_MAX, wait

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


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
        wait(lambda: _answers(28265) and _answers(28366), "dashboard and agent are up", server)
        wait(submitted, "the cluster takes the job")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(ACT_S_MAX)

    summary = json.loads(Path(config.run.directory, "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("completed", 3)
    assert "mine.yaml cannot be read" in outputs[-1]
    assert "leaves out files that .gitignore names" in outputs[-1]
