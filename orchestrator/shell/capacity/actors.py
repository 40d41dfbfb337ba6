"""The run's actors of one kind: the keepers by node, or the workers by name.

They are detached, so they outlive the controller, and the next controller finds them by name. Ray
is called in threads, because its head may answer slowly.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.shell.names import RunNames
from orchestrator.shell.threads import RAY, in_thread

_T = TypeVar("_T")


class ActorPool:
    """Starts, finds and kills actors of one kind; all of them get the arguments ``boot``."""

    def __init__(
        self,
        kind: type,
        options: Mapping[str, Any],
        *,
        names: RunNames,
        name: Callable[[str], str],
        boot: Mapping[str, Any],
    ) -> None:
        #: Made once, because Ray keeps every class that it exports until the controller ends.
        self._kind: Any = ray.remote(kind)
        self._options = options
        self._names = names
        self._name = name
        self._boot = boot
        self._starting: set[asyncio.Future[Any]] = set()

    async def start(self, actor: str, node: str, **arguments: Any) -> Any:
        """Start ``actor`` on ``node``, or find the running one; return its handle.

        If the caller is cancelled in the meantime, ``close`` kills the actor.
        """
        starting = asyncio.ensure_future(in_thread(RAY, self._start, actor, node, arguments))
        self._starting.add(starting)
        handle = await asyncio.shield(starting)
        self._starting.discard(starting)
        return handle

    async def find(self, actor: str) -> Any:
        """Return the handle of a running ``actor``; None if there is none."""
        name, space = self._name(actor), self._names.namespace
        with contextlib.suppress(ValueError):
            return await in_thread(RAY, ray.get_actor, name, namespace=space)
        return None

    async def kill(self, handle: Any, *, restart: bool = False) -> None:
        """SIGKILL an actor; with ``restart`` Ray starts it again."""
        with contextlib.suppress(RayError, ValueError):
            await in_thread(RAY, ray.kill, handle, no_restart=not restart)

    async def run_on(self, node: str, task: Any) -> None:
        """Run a Ray task on ``node``; its argument is the directory of the run there."""
        there = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        with contextlib.suppress(RayError):
            await (await in_thread(RAY, there.remote, self._names.shared_directory(node)))

    async def close(self) -> None:
        """Kill the actors that are still starting."""
        started = await asyncio.gather(*self._starting, return_exceptions=True)
        handles = [handle for handle in started if not isinstance(handle, BaseException)]
        await asyncio.gather(*map(self.kill, handles))

    async def kill_strays(self) -> None:
        """SIGKILL every actor that an earlier incarnation of the controller left behind."""
        for found in await in_thread(RAY, ray.util.list_named_actors, all_namespaces=True):
            is_ours = found["namespace"] == self._names.namespace
            if is_ours and found["name"].startswith(self._name("")):
                await self.kill(await self.find(found["name"].removeprefix(self._name(""))))

    def _start(self, actor: str, node: str, arguments: dict[str, Any]) -> Any:
        options = {
            **self._options,
            "name": self._name(actor),
            "namespace": self._names.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        directory = self._names.shared_directory(node)
        made = self._kind.options(**options)
        return made.remote(directory=directory, **arguments, **self._boot)


async def answer(asked: Awaitable[_T], within_s: float) -> _T | None:
    """Return an actor's answer; None if it is late, or if Ray cannot deliver it."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(within_s):
            return await asked
    return None
