"""Say in a sentence or two what a run does or waits for, and why. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from orchestrator.policies import Mechanism
from ucp_core.numerics import counted


def what_it_does(status: Mapping[str, Any]) -> str:
    """Return what the run does now."""
    phase, states = status["phase"], _states(status)
    num = states["training"] + states["forming"]
    if phase == "training":
        layout = f" ({status['layout']})" if status["layout"] not in ("", "1 worker") else ""
        return f"Trains on {counted(num, 'worker')}{layout}.{_asks(status)}"
    if phase == "waiting":
        return f"Waits for {status['waits_for'] or 'workers'}.{_fleet(status)}{_asks(status)}"
    if phase == "forming":
        formed = states["training"]
        return f"Attempt {status['attempt']} forms: {formed} of {counted(num, 'worker')} are ready."
    why = _cause(status)
    if phase == "yielding":
        return f"Workers finish the step and leave. {why}"
    if phase == "fencing":
        return f"Stops attempt {status['attempt']}. {why}"
    if phase == "reading":
        waits = f" Waits for {status['waits_for']}." if status["waits_for"] else ""
        return f"Looks for the newest step that is safe.{waits} {why}"
    reason = status["reason"] or "it is over"
    return f"{'Has failed' if phase == 'failed' else 'Has ended'}: {reason}."


def what_survives(redundancy: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what memory keeps after the loss of a node, and whether that is enough."""
    losses, mechanism = redundancy["node_losses_survived"], redundancy["mechanism"]
    if not losses:
        return "would not survive a node loss", False
    nodes = counted(losses, "node")
    if mechanism == Mechanism.NONE:
        # Other nodes still hold copies that workers made there before they left.
        return f"survives the loss of {nodes} by older copies, but new steps are not copied", False
    return f"survives the loss of {nodes}" + (f" ({mechanism})" if mechanism else ""), True


def _states(status: Mapping[str, Any]) -> Counter[str]:
    """Return the number of processes in each state; in a large run not all have rows."""
    rows = (*status["workers"], *status["standbys"])
    return Counter(status.get("processes") or (row["state"] for row in rows))


def _asks(status: Mapping[str, Any]) -> str:
    """Return which capacity is missing, and why."""
    lacking = [row for row in status["capacity"] if row["asked"] > row["granted"]]
    if not lacking:
        return ""
    num = sum(row["asked"] - row["granted"] for row in lacking)
    why = next((row["why"] for row in lacking if row["why"]), "")
    return f" Asks for {counted(num, 'more place')}{': ' + why if why else ', not granted yet'}."


def _fleet(status: Mapping[str, Any]) -> str:
    lost = [row["node"][:8] for row in status["nodes"] if row["state"] == "lost"]
    processes = ", ".join(f"{num} {state}" for state, num in _states(status).items())
    return (f" Processes: {processes}." if processes else "") + (
        f" Lost: node {', '.join(lost)}." if lost else ""
    )


def _cause(status: Mapping[str, Any]) -> str:
    cause = status["cause"]
    if not cause:
        return ""
    who = f" of {', '.join(cause['guilty'])}" if cause["guilty"] else ""
    return f"Cause: {cause['kind'].replace('_', ' ')}{who}: {cause['evidence']}."
