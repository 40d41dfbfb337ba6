"""A process whose GPU failed; the script of the run stands in for the driver."""

import mmap
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.forking import forking
from tests.support.made import assignment_of
from tests.support.ranks import JOIN_S_MAX
from workers.process.device import EXIT_CODE
from workers.process.runner import AttemptRunner
from workers.settings import RunSettings, Settings

SCRIPT = """
import types

import everstep
import torch

ERROR = torch.AcceleratorError("CUDA error: {error}")


def fail():
    if {is_lost}:
        raise ERROR


def train(session):
    torch.cuda.is_initialized = lambda: True
    torch.cuda.empty_cache = fail
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.cuda.current_stream = lambda: types.SimpleNamespace(query=fail)
    raise ERROR


everstep.run(train)
"""


def attempts(
    directory: Path, pages: Path | None = None, before: Callable[[], object] | None = None
) -> None:
    """Go through two attempts of a worker, and note how it left them.

    Args:
        directory: Directory of the run and its script.
        pages: Where the worker's records are; ``directory`` if not given.
        before: Runs before the first attempt, when the worker is there.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    runner = AttemptRunner(
        worker="w0001",
        directory=pages or directory,
        run_url=str(directory / "run"),
        settings=Settings(run=RunSettings(directory="run", script=str(directory / "script.py"))),
    )
    if before is not None:
        before()
    for attempt in (1, 2):
        assignment = assignment_of(attempt=attempt, store_port=store.port)
        outcome = runner.run(assignment, ())
        with (directory / "outcomes").open("a") as file:
            file.write(f"{type(outcome).__name__} ")


@pytest.mark.parametrize(
    ("error", "exit_code", "outcomes"),
    [
        ("an illegal memory access", EXIT_CODE, ""),
        # The run ends with what the script did wrong, but the process is of no more use.
        ("device-side assert triggered", EXIT_CODE, "Raised "),
        ("invalid configuration argument", 0, "Raised Raised "),
    ],
)
def test_a_gpu_that_failed_for_good_ends_its_process(
    error: str, exit_code: int, outcomes: str, tmp_path: Path
) -> None:
    """In the same process each later attempt would fail, and the run with it."""
    (tmp_path / "script.py").write_text(SCRIPT.format(error=error, is_lost=exit_code != 0))
    (tmp_path / "outcomes").touch()
    process = forking().Process(target=attempts, args=(tmp_path,))
    process.start()
    process.join(JOIN_S_MAX)

    assert process.exitcode == exit_code
    assert (tmp_path / "outcomes").read_text() == outcomes
    logs = [path.read_text() for path in tmp_path.glob("run/logs/**/*") if path.is_file()]
    assert error in "".join(logs)


def _map_no_more() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (32 << 20), hard))


def test_a_process_that_can_hardly_map_memory_ends_before_it_starts_a_thread(
    tmp_path: Path,
) -> None:
    """Python waits forever for a thread that ends before it runs, as the one of the log may."""
    (tmp_path / "script.py").write_text(SCRIPT.format(error="", is_lost=False))
    process = forking().Process(target=attempts, args=(tmp_path, None, _map_no_more))
    process.start()
    process.join(JOIN_S_MAX)

    assert process.exitcode == EXIT_CODE
    assert not (tmp_path / "outcomes").exists()
    assert not list(tmp_path.glob("run/logs/**/*"))
