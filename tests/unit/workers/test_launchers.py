"""Signals and variables of other launchers and schedulers in a process."""

import subprocess
import sys

from workers.launchers import forget_place

_IGNORING = """
import os, signal, subprocess, sys, threading
from workers.launchers import ignore_schedulers

signal.signal(signal.SIGUSR2, lambda *_: print("handled", flush=True))
thread = threading.Thread(target=ignore_schedulers)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR1)
subprocess.run(["sh", "-c", "kill -USR1 $$; echo child"], check=True)
print("lives")
"""


def test_a_job_keeps_its_id_and_a_process_loses_its_place() -> None:
    """Libraries wait for RANK 1 of WORLD_SIZE 2; scripts name their outputs by the job's id."""
    places = [
        "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE",
        "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
        "SLURM_PROCID", "SLURM_STEP_NODELIST", "WORLD_SIZE",
    ]  # fmt: skip
    kept = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_TMPDIR": "/x", "MY_RANK": "1"}
    environment = {**dict.fromkeys(places, "1"), **kept}

    assert forget_place(environment) == tuple(places)
    assert environment == kept


def test_a_scheduler_s_signal_ends_neither_a_process_nor_its_children() -> None:
    """Their default ends a process, and an actor of Ray is not in the main thread."""
    done = subprocess.run(
        [sys.executable, "-c", _IGNORING], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.split() == ["handled", "child", "lives"]
