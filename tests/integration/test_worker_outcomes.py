"""Answers of a worker's actor about an attempt, at any time and to any caller, without Ray."""

import subprocess
import sys
from pathlib import Path

from tests.support import train_paced
from ucp_core.native import find_committed
from ucp_core.storage import LocalStore

_TOLD = ("Raised", "Yielded", "in ", "stacks", "collects")

#: Two attempts, of which the first is asked about last; and then what they came to.
ASK = """
import asyncio, gc, sys, types
from pathlib import Path

import torch.distributed as dist

from ucp_core.layout import ParallelLayout
from workers.process import actor
from workers.process.actor import Worker
from workers.protocol import Assignment
from workers.settings import RunSettings, Settings

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
        settings=Settings(run=RunSettings(directory="run", script=script)), on_cpu=False,
    )
    print("collects", gc.isenabled(), gc.get_freeze_count() > 100_000)
    for attempt in (1, 2):
        await worker.enter(assignment(attempt), ())
    for attempt in (2, 1):
        outcome = await asyncio.wait_for(worker.attend(attempt), 30)
        print(type(outcome).__name__, outcome.attempt, outcome.error)

asyncio.run(ask())
"""

#: An attempt whose lease runs out is left; the next one goes on where it stopped.
LEAVE = """
import asyncio, sys, types
from pathlib import Path

import torch.distributed as dist

from ucp_core.layout import ParallelLayout
from workers.process import actor
from workers.process.actor import Worker
from workers.protocol import Assignment
from workers.telemetry import Lease
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

actor.ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: "here")
directory, script = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
metrics = Path(directory, "run/metrics/rank0.jsonl")

def assignment(attempt, step=0, by=0, *before):
    return Assignment(
        attempt=attempt, rank=0, layout=ParallelLayout(), store_host="127.0.0.1",
        store_port=store.port, resume_step=step, resume_attempt=by,
        lineage=(*before, (attempt, step)),
    )

async def lines(num):
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num:
        await asyncio.sleep(0.01)

async def ask():
    settings = Settings(
        run=RunSettings(directory="run", script=script, arguments=("0.01",)),
        train=TrainSettings(steps=1_000_000, global_batch=4, micro_batch=4, schedule="constant"),
        checkpoint=CheckpointSettings(every_steps=1_000_000),
    )
    worker = Worker(
        worker="w0001", directory=directory + "/pages", run_url=directory + "/run",
        settings=settings, on_cpu=False,
    )
    lease = Lease(Path(directory, "pages"))
    await worker.enter(assignment(1), ())
    await lines(3)
    Path(directory, "pages/lease").write_bytes(bytes(8))
    left = await worker.attend(1)
    print(type(left).__name__, left.step, flush=True)
    await worker.fence(1)
    stacks = Path(directory, "pages/w0001.stacks")
    print("stacks", "_train_forever" in stacks.read_text(), flush=True)
    print("in", (await worker.hello())["attempt"], flush=True)
    Lease(Path(directory, "pages")).renew()
    await worker.enter(assignment(2, left.step, 1, (1, 0)), ())
    print("stacks", stacks.read_text(), flush=True)
    await lines(left.step + 3)
    await worker.yield_at_boundary(2)
    left = await worker.attend(2)
    print(type(left).__name__, left.step, flush=True)

asyncio.run(ask())
"""


def told(directory: Path, script: Path, ask: str = ASK) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ask, str(directory), str(script)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(_TOLD)]


def test_an_attempt_may_end_before_anybody_asks_how(tmp_path: Path) -> None:
    """A script that is not there ends it in a millisecond, and who enters it asks a call later.

    The thread that trains would have ended with it, and left a process that answers and does
    nothing more.
    """
    collects, *lines = told(tmp_path, tmp_path / "missing.py")

    assert collects == "collects True True", "what a script makes is looked at, imports are not"
    assert [line.split()[:3] for line in lines] == [
        ["Raised", "2", "TaskError:"],
        ["Raised", "1", "TaskError:"],
    ]


def test_any_error_of_a_script_is_reported(tmp_path: Path) -> None:
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

    _, *lines = told(tmp_path, script)

    assert lines == [
        "Raised 2 CancelledError: by its reader",
        "Raised 1 CancelledError: by its reader",
    ]
    for attempt in (1, 2):
        log = (tmp_path / f"run/logs/attempt-000{attempt}/rank0.log").read_text().splitlines()
        assert log[:2] == ["about to raise", "Traceback (most recent call last):"]
        assert log[-1] == "asyncio.exceptions.CancelledError: by its reader"


def test_a_trainer_whose_lease_runs_out_leaves_its_last_step_in_storage(tmp_path: Path) -> None:
    """It trained on until Ray ended it, and lost what it had trained; now it waits, and goes on."""
    left, written, idle, emptied, again = told(tmp_path, Path(train_paced.__file__), LEAVE)

    kind, step = left.split()
    assert (kind, idle) == ("Yielded", "in 0")
    # A fence leaves stacks, and only those of its attempt.
    assert (written, emptied) == ("stacks True", "stacks ")
    checkpoints = str(tmp_path / "run/checkpoints")
    assert f"step-{int(step):08d}" in [path.name for path in Path(checkpoints).iterdir()]
    found = find_committed(LocalStore(), checkpoints, lineage=((1, 0), (2, int(step))))
    assert found is not None
    assert (again.split()[0], found.step) == ("Yielded", int(again.split()[1]))
    assert found.step >= int(step) + 3
