"""What a worker's actor tells of an attempt, whoever asks when. Ray is not started for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Two attempts, of which the first is asked about last; and then what they came to.
ASK = """
import asyncio, sys, types
from pathlib import Path

import torch.distributed as dist

from ucp_core.layout import ParallelLayout
from workers.process import actor
from workers.process.actor import Worker
from workers.protocol import Assignment
from workers.settings import Settings

actor.ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: "here")
directory, script = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def assignment(attempt):
    return Assignment(
        attempt=attempt, rank=0, layout=ParallelLayout(), store_host="127.0.0.1",
        store_port=store.port, resume_step=0, resume_attempt=0, lineage=((attempt, 0),),
    )

async def ask():
    worker = Worker(
        worker="w0001", directory=directory + "/pages", run_url=directory + "/run",
        settings=Settings(script=script).to_json(), on_cpu=False,
    )
    for attempt in (1, 2):
        await worker.enter(assignment(attempt), ())
    for attempt in (2, 1):
        outcome = await asyncio.wait_for(worker.attend(attempt), 30)
        print(type(outcome).__name__, outcome.attempt, outcome.error)

asyncio.run(ask())
"""


def told(directory: Path, script: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(directory), str(script)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("Raised")]


def test_an_attempt_may_end_before_anybody_asks_how(tmp_path: Path) -> None:
    """A script that is not there ends it in a millisecond, and who enters it asks a call later.

    The thread that trains would have ended with it, and left a process that answers and does
    nothing more.
    """
    lines = told(tmp_path, tmp_path / "missing.py")

    assert [line.split()[:3] for line in lines] == [
        ["Raised", "2", "TaskError:"],
        ["Raised", "1", "TaskError:"],
    ]


def test_whatever_a_script_raises_is_told(tmp_path: Path) -> None:
    """A cancelled task of asyncio is no Exception: it would end the thread without an outcome."""
    script = tmp_path / "cancelled.py"
    script.write_text(
        "import asyncio\n"
        "from everstep import run\n"
        "def train(session):\n"
        "    print('about to raise')\n"
        "    raise asyncio.CancelledError('by its reader')\n"
        "run(train)\n"
    )

    lines = told(tmp_path, script)

    assert lines == [
        "Raised 2 CancelledError: by its reader",
        "Raised 1 CancelledError: by its reader",
    ]
    for attempt in (1, 2):
        log = (tmp_path / f"run/logs/attempt-000{attempt}/rank0.log").read_text().splitlines()
        assert log[:2] == ["about to raise", "Traceback (most recent call last):"]
        assert log[-1] == "asyncio.exceptions.CancelledError: by its reader"
