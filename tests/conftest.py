"""Rules of every suite: markers follow from the folder, and a skip says its reason.

No fixture lives here. The fixtures of the shared Ray cluster are in
``tests/integration/cluster/conftest.py``; builders and fakes are plain modules in
``tests/support``.
"""

import importlib.util
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

# A time limit per example measures the machine's load, not the code (it failed at load 7 on two
# cores). On a merge the examples are always the same, so few are tried; elsewhere new ones are
# looked for.
_IS_MERGE = os.environ.get("CI") == "true"
hypothesis_settings.register_profile(
    "everstep",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=_IS_MERGE,
    max_examples=50 if _IS_MERGE else 100,
    print_blob=True,
)
hypothesis_settings.load_profile("everstep")

# Set before anything imports ray or torch; children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Each connection to a store of torch asks DNS for the name of 127.0.0.1, at both ends. Where a
# packet is lost (one of 25, where it was measured), the resolver waits for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

TESTS = Path(__file__).parent

# Processes that tests start find the packages as this one does (``pythonpath`` in pyproject.toml),
# also where everstep is not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS.parent), str(TESTS.parent / "workers/public"), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

#: As much of a journal is shown as tells what a run waited for.
_JOURNAL_LINES, _LINE_CHARS = 60, 300

#: A test under the folder has the marker without saying so.
MARKER_BY_FOLDER = {
    "simulation": "simulation",
    "integration": "ray",
    "interop": "interop",
    "chaos": "chaos",
}

#: The folders that were there when pytest started, where it was started.
_FOLDERS = pytest.StashKey[set[str]]()

#: Each is run by one process from beginning to end. They come first: they take longest, and wait
#: most of that time.
TOGETHER = ("tests/integration/cluster/", "tests/integration/own_cluster/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests to processes by module, so that what its fixtures have made is made once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = str(super()._split_scope(nodeid))
            return next((folder for folder in TOGETHER if path.startswith(folder)), path)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKER_BY_FOLDER:
            item.add_marker(MARKER_BY_FOLDER[folder])
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in TOGETHER])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs a CUDA device; torch sees none on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, of a test that failed, the journals of its runs: they are gone with its folder."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for path in sorted(folder.rglob("journal/*.jsonl")):
            lines = path.read_text(errors="replace").splitlines()[-_JOURNAL_LINES:]
            report.sections.append((str(path), "\n".join(line[:_LINE_CHARS] for line in lines)))
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_FOLDERS] = _empty_folders(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was given a bare name as a path and has made a folder of that name.

    Only empty ones count: whoever works in the same directory leaves something in his.
    """
    before = session.config.stash[_FOLDERS]
    left = _empty_folders(session.config) - before
    if left and not hasattr(session.config, "workerinput"):
        print(f"\nleft behind where pytest was started: {', '.join(sorted(left))}")  # noqa: T201
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _empty_folders(config: pytest.Config) -> set[str]:
    found = [path for path in config.invocation_params.dir.iterdir() if path.name[0] != "."]
    return {path.name for path in found if path.is_dir() and not any(path.iterdir())}


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
