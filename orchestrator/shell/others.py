"""Ask the other runs on the cluster what they hold and lack. It decides nothing."""

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.core import events as ev
from orchestrator.policies import Share
from orchestrator.shell.capacity import answer
from orchestrator.shell.clock import monotonic_s
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.names import CONTROLLER, NAMESPACE_PREFIX, RunNames
from orchestrator.shell.threads import RAY, in_thread

#: Period of questions, and bound for an answer; controllers answered in 1 to 50 ms.
POLL_S = 2.0
ANSWER_S = 1.0
#: How long the last answer of a silent controller counts: Ray may be restarting it.
KEPT_S = 30.0

log = logging.getLogger(__name__)


class Others:
    """The other runs on the cluster; posts ``OthersSeen`` while there are any."""

    def __init__(self, inbox: Inbox, *, names: RunNames) -> None:
        self._names = names
        self._inbox = inbox
        self._controllers: dict[str, Any] = {}
        self._said: dict[str, tuple[float, Share]] = {}

    async def poll_forever(self) -> None:
        """Report their answers until cancelled."""
        # A restarted controller may have left workers to a run that has ended since.
        was_shared = True
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(RayError):  # Ray does not answer while its head is down
                namespaces = await in_thread(RAY, self._find)
                await asyncio.gather(*map(self._ask, namespaces))
                self._forget(namespaces)
                shares = tuple(share for _, (_, share) in sorted(self._said.items()))
                if shares or was_shared:
                    at_s, run = self._inbox.at_s(), self._names.run_id
                    self._inbox.post(ev.OthersSeen(at_s=at_s, run=run, others=shares))
                was_shared = bool(shares)

    def _find(self) -> list[str]:
        """Return the namespaces of the other runs, and keep handles of their controllers."""
        found = [
            actor["namespace"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["name"] == CONTROLLER
            and actor["namespace"].startswith(NAMESPACE_PREFIX)
            and actor["namespace"] != self._names.namespace
        ]
        for namespace in found:
            if namespace not in self._controllers:
                with contextlib.suppress(ValueError):  # it has just ended
                    self._controllers[namespace] = ray.get_actor(CONTROLLER, namespace=namespace)
        return found

    async def _ask(self, namespace: str) -> None:
        controller = self._controllers.get(namespace)
        if controller is None:
            return
        said = await answer(controller.share.remote(), ANSWER_S)
        if said is None:
            # The next run in the same directory has another controller.
            del self._controllers[namespace]
            return
        try:
            self._said[namespace] = (monotonic_s(), Share(**said))
        except (AttributeError, TypeError) as error:  # a version with another report
            log.warning("the report of run %s is not understood: %s", namespace, error)

    def _forget(self, namespaces: list[str]) -> None:
        oldest_s = monotonic_s() - KEPT_S
        self._said = {
            namespace: said
            for namespace, said in self._said.items()
            if namespace in namespaces and said[0] >= oldest_s
        }
        self._controllers = {
            namespace: controller
            for namespace, controller in self._controllers.items()
            if namespace in namespaces
        }
