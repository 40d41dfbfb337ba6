"""The batch script, under commands that stand in for Slurm's, Ray's and everstep's."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "cluster_configs/slurm/run.sbatch"
#: Each writes down how it was called. A head and a run last until the job is ended.
COMMANDS = {
    "scontrol": '[ "$1" = show ] && printf "n1\\nn2\\n"; exit 0',
    "srun": '[ "${HEAD_ENDS:-}" ] && exit 1; exec sleep 60',
    "ray": 'exit "${HEALTH:-0}"',
    "everstep": '[ "$1" = stop ] && exit 3; exec sleep 60',
}
STUB = """#!/bin/bash
echo "$(basename "$0") $* cpus=${SRUN_CPUS_PER_TASK:-} health=${RAY_health_check_timeout_ms:-}" \
  >> "$CALLS"
"""
WAIT_S = 20.0

Job = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Start the script as Slurm does; what it started ends with the test."""
    for name, does in COMMANDS.items():
        (tmp_path / name).write_text(f"{STUB}{does}\n")
        (tmp_path / name).chmod(0o755)
    said = (tmp_path / "said").open("wb")
    started: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> subprocess.Popen[bytes]:
        slurm = {
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "64",
        }
        own = {"CALLS": str(tmp_path / "calls"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        started.append(
            subprocess.Popen(
                ["/bin/bash", SCRIPT],
                env={**own, **slurm, **variables},
                cwd=tmp_path,
                stderr=said,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    said.close()
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _called(folder: Path, what: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until the script has called something that begins so, and return the whole call."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        is_over = process.poll() is not None
        calls = (folder / "calls").read_text() if (folder / "calls").exists() else ""
        found = [call for call in calls.splitlines() if call.startswith(what)]
        if found:
            return found[-1]
        if is_over:
            break
        time.sleep(0.02)
    raise AssertionError(f"no `{what}` among: {calls}")


def test_a_job_whose_run_cannot_be_stopped_is_queued_again(job: Job, tmp_path: Path) -> None:
    """Its time is over in any case; it would not come back by itself."""
    process = job()
    _called(tmp_path, "everstep run", process)

    process.send_signal(signal.SIGTERM)

    assert _called(tmp_path, "scontrol requeue", process).startswith("scontrol requeue 42 ")
    assert _called(tmp_path, "everstep stop", process)


@pytest.mark.parametrize("trouble", [{"HEAD_ENDS": "1"}, {"START_S": "1"}], ids=["ends", "mute"])
def test_a_head_that_does_not_start_ends_the_job(
    job: Job, tmp_path: Path, trouble: dict[str, str]
) -> None:
    """Idle GPUs until the time limit would be paid for."""
    process = job(HEALTH="1", **trouble)

    assert process.wait(WAIT_S) == 1
    assert "Ray's head on n1:" in (tmp_path / "said").read_text()


def test_every_job_has_its_own_port(job: Job, tmp_path: Path) -> None:
    """On a shared node a fixed one would join the cluster of somebody else."""
    ports = set()
    for number in ("1041", "1042"):
        (tmp_path / "calls").unlink(missing_ok=True)
        process = job(SLURM_JOB_ID=number)
        head = _called(tmp_path, "srun --nodes=1 --ntasks=1 --overlap -w n1 ", process)
        rest = _called(tmp_path, "srun --nodes=1 --ntasks=1 --overlap --exclude=n1 ", process)
        run = _called(tmp_path, "everstep run", process)
        port = head.split("--port=")[1].split()[0]
        assert f" --address n1:{port} " in run
        assert f" --address=n1:{port} " in rest
        ports.add(int(port))

    assert len(ports) == 2
    # Ray's workers take up to 19999, and the system what is above 32767.
    assert all(20000 <= port < 32768 for port in ports)


def test_ray_gets_the_processors_of_the_job(job: Job, tmp_path: Path) -> None:
    """Since Slurm 22.05 a step has one processor unless it asks for more."""
    process = job()
    _called(tmp_path, "everstep run", process)

    assert " cpus=64 " in _called(tmp_path, "srun", process)
