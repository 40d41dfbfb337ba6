"""Actions that a user requests on a run's page. Each becomes an event in the journal."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from orchestrator.core import events as ev
from orchestrator.errors import ActionError
from orchestrator.shell.parts import Parts
from ucp_core.numerics import counted

#: The run leaves a drained node within this time; earlier if a replacement is ready.
DRAIN_S = 30.0


class Actions:
    """Performs actions on the run's loop; ``spawn`` runs a coroutine in the background."""

    def __init__(
        self,
        parts: Parts,
        *,
        stop: Callable[[str], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        self._parts = parts
        self._stop = stop
        self._spawn = spawn
        self._actions: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "stop": self._stop_at,
            "save": self._save,
            "drain": self._drain,
            "undrain": self._undrain,
            "workers": self._set_workers,
            "kill": self._kill,
        }

    def perform(self, name: str, what: Mapping[str, Any]) -> str:
        """Perform an action; return a line for people.

        ``name`` is stop (``step``, 0 for the next one), save, drain or undrain (``node``), workers
        (``num``), or kill (``worker`` or ``node``).

        Raises:
            ActionError: There is no such action, or it is impossible now.
        """
        action = self._actions.get(name)
        if action is None:
            raise ActionError(f"there is no action {name!r}; there are {', '.join(self._actions)}")
        return action(what)

    @property
    def _at_s(self) -> float:
        return self._parts.inbox.at_s()

    def _stop_at(self, what: Mapping[str, Any]) -> str:
        step = _number(what, "step")
        if not step:
            self._stop("stopped from the page")
            return "The run stops at the next step boundary."
        goal, now = self._parts.rules.total_steps, self._parts.state.attempt.step
        if not now < step < goal:
            raise ActionError(f"step {step} is not between the current one, {now}, and {goal}")
        reason = f"stopped from the page, after step {step}"
        self._parts.inbox.post(ev.StopRequested(at_s=self._at_s, reason=reason, step=step))
        return f"The run stops after step {step}, or at the first step boundary after it."

    def _save(self, _what: Mapping[str, Any]) -> str:
        if not self._parts.config.snapshot.every_steps:
            raise ActionError("memory holds nothing to store: snapshot.every_steps is 0")
        step = self._parts.protection.redundancy(self._parts.state)["step"]
        if not step:
            raise ActionError("no step is complete in memory yet")
        self._parts.inbox.post(ev.SaveRequested(at_s=self._at_s))
        self._spawn(self._parts.snapshots.flush(self._parts.state.lineage))
        return f"Step {step}, or a newer one in memory, is being stored."

    def _drain(self, what: Mapping[str, Any]) -> str:
        node = self._living_node(what)
        self._parts.nodes.notices.on_user(node, DRAIN_S)
        return f"The run leaves node {node[:8]} at a step boundary, within {DRAIN_S:g} s."

    def _undrain(self, what: Mapping[str, Any]) -> str:
        node = self._living_node(what)
        if not self._parts.nodes.notices.withdraw(node):
            raise ActionError(f"node {node[:8]} is not drained from the page")
        return f"The run may use node {node[:8]} again."

    def _set_workers(self, what: Mapping[str, Any]) -> str:
        num, workers = _number(what, "num"), self._parts.config.workers
        if not workers.min <= num <= workers.max:
            raise ActionError(
                f"{num} workers are not between workers.min, {workers.min}, and workers.max, "
                f"{workers.max}; to change these, resume the run with other values"
            )
        fits = self._parts.rules.wanted(num, self._parts.state.refused)
        if not fits:
            raise ActionError(f"no layout of this run fits on {num} workers")
        self._parts.inbox.post(ev.WorkersSet(at_s=self._at_s, num=num))
        least = "" if fits == num else f"; its layout fits on {fits}"
        tolerance, groups = (
            self._parts.rules.snapshot.tolerance,
            fits // self._parts.rules.layout.tp,
        )
        price = (
            f" On fewer than {tolerance + 1} nodes snapshots do not survive "
            f"{counted(tolerance, 'lost node')}: a step that is not in storage may be lost."
            if groups <= tolerance
            else ""
        )
        return f"The run has at most {counted(num, 'worker')} from now on{least}.{price}"

    def _kill(self, what: Mapping[str, Any]) -> str:
        if "node" in what:
            return self._kill_node(what)
        name = str(what.get("worker", ""))
        fleet = self._parts.state.fleet
        found = next((one for one in fleet.workers.values() if one.name == name), None)
        if found is None:
            raise ActionError(f"there is no worker {name!r}")
        node = fleet.nodes[found.node].name
        self._note_fault("SIGKILL", name)
        self._spawn(self._parts.keepers.kill_worker(node, name))
        return f"{name} gets SIGKILL."

    def _kill_node(self, what: Mapping[str, Any]) -> str:
        node = self._living_node(what)
        if node == self._parts.nodes.here:
            raise ActionError("the controller runs on this node and would end with it")
        if self._parts.nodes.views[node].keeper is None:
            raise ActionError(f"node {node[:8]} has no keeper that could do it")
        self._note_fault("node_kill", node)
        self._spawn(self._parts.keepers.kill_node(node))
        return f"Node {node[:8]} is killed."

    def _note_fault(self, fault: str, target: str) -> None:
        self._parts.inbox.post(ev.FaultInjected(at_s=self._at_s, fault=fault, target=target))

    def _living_node(self, what: Mapping[str, Any]) -> str:
        node = str(what.get("node", ""))
        view = self._parts.nodes.views.get(node)
        if view is None or view.lost.is_set():
            raise ActionError(f"there is no living node {node[:8]!r}")
        return node


def _number(what: Mapping[str, Any], name: str) -> int:
    value = what.get(name, 0)
    if not isinstance(value, int):
        raise ActionError(f"{name} must be a whole number, not {value!r}")
    return value
