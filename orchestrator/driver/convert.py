"""Convert a checkpoint on all nodes of a Ray cluster; only this process commits the result.

Each batch of ``ucp_core.conversion`` is a Ray task. If a task dies with its worker or node, another
task repeats the batch and writes the same bytes to the same place.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from orchestrator.driver.cluster import join_cluster
from orchestrator.errors import CapacityError
from orchestrator.shell import HostedCluster
from ucp_core.conversion import Batch, ConvertResult, Job, Result, convert, do_batch
from ucp_core.native import Checkpoint
from ucp_core.storage import open_store

#: A batch that fails this many times does not fail by chance.
TRIES_MAX = 4
#: Batches per processor beyond the current one, so that no processor waits for its next batch.
_AHEAD = 2


@ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")
def _do(job: Job, batch: Batch) -> list[Result]:
    return do_batch(job, batch)


def convert_on_cluster(
    checkpoint: Checkpoint,
    destination: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertResult:
    """Make a universal checkpoint with all processors of the connected Ray cluster.

    A killed conversion to the same destination continues where it stopped.

    Args:
        checkpoint: The source, of any format, on storage that every node sees.
        destination: Directory or URL; a local path must be on storage that the nodes share.
        memory_bytes: Limit for the buffers of all tasks.
        progress: Called with the bytes done and the bytes of the whole state.

    Raises:
        CapacityError: The cluster has no processors, or a batch failed ``TRIES_MAX`` times.
        UcpError: As ``ucp_core.conversion.convert`` does.
    """
    store, directory = open_store(destination)
    processors = int(ray.cluster_resources().get("CPU", 0))
    if processors < 1:
        raise CapacityError("the cluster has no processors; add a node", processors=processors)
    return convert(
        checkpoint,
        store,
        directory,
        memory_bytes=memory_bytes,
        processes=processors,
        progress=progress,
        runner=run_on_cluster,
    )


def run_on_cluster(job: Job, batches: Sequence[Batch], take: Callable[[Result], None]) -> None:
    """Run batches as tasks and pass every result to ``take``; a runner of ``convert``.

    Raise ``CapacityError`` if a batch failed ``TRIES_MAX`` times.
    """
    shared = ray.put(job)
    left = deque((batch, 1) for batch in batches)
    under_way: dict[Any, tuple[Batch, int]] = {}
    try:
        while left or under_way:
            processors = int(ray.cluster_resources().get("CPU", 1))
            while left and len(under_way) < processors * (1 + _AHEAD):
                batch, tries = left.popleft()
                under_way[_do.remote(shared, batch)] = (batch, tries)
            ready, _ = ray.wait(list(under_way), num_returns=1)
            for reference in ready:
                batch, tries = under_way.pop(reference)
                results = _results(reference)
                if results is not None:
                    for result in results:
                        take(result)
                elif tries < TRIES_MAX:
                    left.append((batch, tries + 1))
                else:
                    raise CapacityError(
                        f"a task died {tries} times: see Ray's logs for memory or node "
                        "failures; the same command continues from here",
                        tries=tries,
                    )
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)


def _results(reference: Any) -> list[Result] | None:
    """Return the results of a task, or None if it died; raise what it raised."""
    try:
        found: list[Result] = ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
    except RayError:
        return None
    return found


def convert_command(  # noqa: PLR0913 - options of a command
    source: str,
    destination: str,
    *,
    address: str | None,
    local_nodes: int | None,
    memory: str,
    rules: str | None,
    rename: str | None,
    tag: str | None,
    quiet: bool,
) -> dict[str, Any]:
    """Connect to a cluster or start one, convert, and return what was done."""
    from ucp_core.commands import conversion_facts, memory_size, open_any, progress

    memory_bytes = memory_size(memory)
    checkpoint = open_any(source, rules=rules, rename=rename, tag=tag, memory_bytes=memory_bytes)
    address = address or os.environ.get("RAY_ADDRESS")
    hosted = None
    if address is None or local_nodes is not None:
        num_nodes = local_nodes or 1
        cpus = max(1, (os.cpu_count() or 1) // num_nodes)
        hosted = HostedCluster(num_nodes=num_nodes, cpus_per_node=cpus)
        address = hosted.address
    try:
        join_cluster(address, advice=". Start one, or give --local-nodes")
        with progress("converting", as_json=quiet) as bar:
            result = convert_on_cluster(
                checkpoint, destination, memory_bytes=memory_bytes, progress=bar
            )
    finally:
        if hosted is not None:
            hosted.shutdown()
        else:
            ray.shutdown()
    return conversion_facts(result, destination)
