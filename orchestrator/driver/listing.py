"""List every run on this machine, or on one cluster (``everstep list``)."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from orchestrator.driver.cluster import join_cluster
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, ConfigError, OrchestratorError
from orchestrator.shell import (
    CONTROLLER,
    NAMESPACE_PREFIX,
    LocalEntry,
    local_clusters,
    wall_time,
    why_silent,
)
from ucp_core.errors import UcpError

#: A controller answers in 1 to 50 ms; one that Ray is starting again takes a second or two.
ANSWER_S = 5.0
#: Facts that only a controller knows.
_UNKNOWN = ("step", "workers", "standbys", "since", "page")


def list_runs(address: str | None) -> list[dict[str, Any]]:
    """Return a document for each run: directory, phase, step, workers, start time, and cluster.

    Without an address, look at every Ray cluster with a process of this user on this machine,
    because Ray ends a process that joins another user's cluster. A cluster of simulated nodes is
    listed even without a run, so that none stays hidden.

    Raises:
        CapacityError: No cluster answers at ``address``.
    """
    entries = {entry.address: entry for entry in local_clusters()}
    if address is not None:
        return list(_runs_at(address, entries.get(address)))
    addresses = sorted({*entries, *own_heads()})
    found: list[dict[str, Any]] = []
    for one in addresses:
        try:
            found += _runs_at(one, entries.get(one))
        except CapacityError as error:
            found.append(_row(one, entries.get(one), note=str(error)))
    return found


def own_heads() -> set[str]:
    """Return the head addresses of this user's Ray nodes on this machine."""
    option, found = "--gcs-address=", set[str]()
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, words = process.info["uids"], process.info["cmdline"] or ()
        if uids and uids.real == os.getuid() and words and words[0].endswith("/raylet"):
            found |= {word.removeprefix(option) for word in words if word.startswith(option)}
    return found


def _runs_at(address: str, entry: LocalEntry | None) -> Iterator[dict[str, Any]]:
    if entry is not None and (why := why_silent(address)):
        # Without its head the cluster trains nothing, but its processes are still there.
        yield _row(address, entry, note=f"{_note(entry)}; its head is gone: {why}")
        return
    try:
        join_cluster(address)
    except ConfigError as error:
        raise CapacityError(str(error)) from error
    try:
        namespaces = sorted(
            actor["namespace"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["name"] == CONTROLLER and actor["namespace"].startswith(NAMESPACE_PREFIX)
        )
        for namespace in namespaces:
            yield _run(address, entry, namespace)
        if entry is not None and not namespaces:
            yield _row(address, entry, note=_note(entry))
    finally:
        ray.shutdown()


def _run(address: str, entry: LocalEntry | None, namespace: str) -> dict[str, Any]:
    try:
        controller: Any = ray.get_actor(CONTROLLER, namespace=namespace)
        status = ray.get(controller.status.remote(), timeout=ANSWER_S)
    except (ValueError, RayError, TimeoutError):
        run_id = namespace.removeprefix(NAMESPACE_PREFIX)
        note = f"the controller of {run_id} does not answer"
        return _row(address, entry, note=note, phase="controller down")
    return _row(
        address,
        entry,
        note=_note(entry),
        directory=status["directory"],
        phase=status["phase"],
        step=status["step"],
        workers=len(status["workers"]),
        standbys=len(status["standbys"]),
        since=round(wall_time() - status["at_s"], 3),
        page=_page(status["directory"]),
    )


def _page(directory: str) -> str | None:
    """Return the address of the run's page; None if its storage cannot be reached from here."""
    with contextlib.suppress(UcpError, OrchestratorError):
        return f"{Run(directory).contact()['url']}/"
    return None


def _row(address: str, entry: LocalEntry | None, *, note: str, **known: Any) -> dict[str, Any]:
    directory = entry.run_directory or None if entry is not None else None
    row = {"directory": directory, "phase": "no run", **dict.fromkeys(_UNKNOWN)}
    return {**row, "address": address, "note": note, **known}


def _note(entry: LocalEntry | None) -> str:
    """Return, for people, what ends the cluster."""
    if entry is None:
        return ""
    if not entry.is_hosted:
        return f"orphaned simulated nodes; end them with `kill -KILL -- -{entry.host_pid}`"
    if entry.is_detached:
        return "detached simulated nodes, which end with the run"
    return f"simulated nodes of process {entry.starter_pid}"
