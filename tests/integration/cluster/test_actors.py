"""The start of a run's actors in a real Ray."""

import asyncio
from typing import Any

import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_list

from orchestrator.shell import RunNames
from orchestrator.shell.capacity import ActorPool


@pytest.mark.usefixtures("cluster")
def test_all_actors_of_a_pool_share_one_class() -> None:
    """Ray keeps each class that it exports until the controller ends."""

    class Idle:
        def __init__(self, directory: str) -> None:
            self.directory = directory

    names = RunNames("one-class")
    pool = ActorPool(Idle, {"num_cpus": 0}, names=names, name=names.worker, boot={})
    node = ray.nodes()[0]["NodeID"]

    async def start_three() -> list[Any]:
        return [await pool.start(f"w{number}", node) for number in range(3)]

    before = _classes()
    handles = asyncio.run(start_three())

    assert len(_classes() - before) == 1
    for handle in handles:
        ray.kill(handle)


def _classes() -> set[bytes]:
    return set(_internal_kv_list(b"ActorClass:", namespace=b"fun"))
