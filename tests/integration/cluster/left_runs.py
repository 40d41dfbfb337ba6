"""Runs that a test leaves on the cluster that the next tests share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from orchestrator.report import CONTACT, SUMMARY
from orchestrator.shell import RunNames, run_id
from tests.support.run_command import everstep


@contextmanager
def runs_ended(folder: Path) -> Iterator[None]:
    """End by force what is left in the end of runs in ``folder`` that are not over.

    One whose test has failed would train on, and keep the processors and nodes from all tests that
    follow.
    """
    try:
        yield
    finally:
        begun = [path.parent for path in folder.rglob(CONTACT)]
        for directory in begun:
            if not Path(directory, SUMMARY).exists() and actors_of(directory):
                ended = everstep("stop", str(directory), "--force")
                assert ended.returncode == 0, ended.stderr


def actors_of(directory: Path) -> list[str]:
    """Return the names of the actors of a run on the cluster of this process."""
    namespace = RunNames(run_id(str(directory))).namespace
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == namespace]
