"""Tell a Prometheus on this machine where the controllers of runs are (``file_sd_configs``).

Ray's own discovery file has no place for other targets, and Prometheus accepts a pattern only for
the names of files in one folder. So all controllers of a machine use one folder.
"""

import contextlib
import json
import logging
import tempfile
from pathlib import Path

from ucp_core.errors import UcpError
from ucp_core.storage import LocalStore

log = logging.getLogger(__name__)


def targets_path(run_id: str) -> Path:
    """Return the file with the address of the run's controller."""
    return Path(tempfile.gettempdir(), "everstep-metrics", f"{run_id}.json")


def announce(run_id: str, *, run: str, url: str) -> None:
    """Write where the run's metrics are; a failure is only logged."""
    labels = {"job": "everstep", "run": run, "run_id": run_id}
    target = {"targets": [url.partition("://")[2]], "labels": labels}
    path = targets_path(run_id)
    try:
        LocalStore().write_atomic(str(path), json.dumps([target]).encode(), fsync=False)
    except UcpError as error:
        log.warning("Prometheus cannot find the run by %s: %s", path, error)


def withdraw(run_id: str) -> None:
    """Remove the file, because the run is over."""
    with contextlib.suppress(OSError):
        targets_path(run_id).unlink()
