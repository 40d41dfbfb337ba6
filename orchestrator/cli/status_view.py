"""What ``everstep status`` prints for people: who is where, what is safe, what happened last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from orchestrator.driver import sources_text

#: Enough of a node's id to tell it from others, and for ``everstep plan --lose``.
_NODE_CHARS = 8


def print_status(status: Mapping[str, Any], console: Console) -> None:
    """Print a status document (``orchestrator.driver.status.read_status``)."""
    _say(console, _headline(status))
    for columns, rows in (
        (("rank", "worker", "node", "pid", "state", "at", "heartbeat"), _worker_rows(status)),
        (("node", "state", "raylet pid", "keeper pid", "slots"), _node_rows(status)),
    ):
        if rows:
            _say(console, "\n".join(("", *_table((columns, *rows)))))
    _say(console, "\n".join(("", *_facts(status))))


def _say(console: Console, text: str) -> None:
    # What peers and the system say has brackets of its own, which are no markup.
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines. Not cut at the terminal's width: half a process id is another one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _headline(status: Mapping[str, Any]) -> str:
    loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
    layout = f" on {status['layout']}" if status["layout"] else ""
    away = "; the controller is down: this was true last" if status["controller"] == "down" else ""
    return (
        f"{status['phase']}: attempt {status['attempt']}{layout}, step {status['step']}{loss}{away}"
    )


def _worker_rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(worker["rank"]) if worker["rank"] >= 0 else "-",
            worker["worker"],
            worker["node"][:_NODE_CHARS],
            _known(worker["pid"]),
            worker["state"],
            _place(worker),
            _ago(worker["last_heartbeat_s"]),
        )
        for worker in status["workers"]
    ]


def _place(worker: Mapping[str, Any]) -> str:
    if worker["rank"] < 0 or worker.get("step") is None:
        return "-"
    return f"step {worker['step']}, {worker['phase']}"


def _node_rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            node["node"][:_NODE_CHARS],
            node["state"],
            _known(node["raylet_pid"]),
            _known(node["keeper_pid"]),
            " ".join(map(str, node["slots"])) or "-",
        )
        for node in status["nodes"]
    ]


def _facts(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each thing that is to be known besides who is where."""
    redundancy, cadence, cause = status["redundancy"], status["cadence"], status["cause"]
    if status["pending_capacity"]:
        yield f"asked for: room for {status['pending_capacity']} more workers"
    if redundancy["step"]:
        losses = redundancy["node_losses_survived"]
        yield f"in memory: step {redundancy['step']}, survives the loss of {_nodes(losses)}"
    yield f"in storage: {_stored(redundancy)}"
    if redundancy["reason"]:
        yield f"redundancy: {redundancy['reason']}"
    yield f"saves: {_cadence(cadence)}"
    yield f"intervals: {cadence['reason']}"
    if status["loaded"]:
        yield f"loaded: {sources_text(status['loaded'])}"
    for line in status["passed_over"]:
        yield f"passed over: {line}"
    for problem in (*redundancy["problems"], *cadence["problems"]):
        yield f"problem: {problem}"
    if cause is not None:
        guilty = f" ({', '.join(cause['guilty'])})" if cause["guilty"] else ""
        evidence = f": {cause['evidence']}" if cause["evidence"] else ""
        yield f"last change: {cause['kind']}{guilty}{evidence}"
    if status["reason"]:
        yield f"ended: {status['reason']}"
    if status["bounds_s"]:
        listing = ", ".join(f"{name} {bound_s:g} s" for name, bound_s in status["bounds_s"].items())
        yield f"bounds of waits: {listing}"


def _stored(redundancy: Mapping[str, Any]) -> str:
    return f"step {redundancy['stored_step']}" if redundancy["stored_step"] else "nothing yet"


def _cadence(cadence: Mapping[str, Any]) -> str:
    due, taken = cadence["snapshot_steps"], cadence["snapshot_taken_steps"]
    is_slow = taken is not None and taken > due
    late = f" (in fact {_every(taken)}: sooner none is complete and copied)" if is_slow else ""
    parts = [
        f"{what} {_every(steps)}{note}"
        for what, steps, note in (
            ("a snapshot", due, late),
            ("a checkpoint", cadence["checkpoint_steps"], ""),
        )
        if steps
    ]
    share = cadence["cost_share"]
    cost = (
        ""
        if share is None
        else f"; {share:.2%} of step time, at most {cadence['cost_share_max']:.0%}"
    )
    return (", ".join(parts) or "nothing regularly") + cost


def _every(steps: int) -> str:
    return "each step" if steps == 1 else f"every {steps} steps"


def _nodes(number: int) -> str:
    return f"{number} node" if number == 1 else f"{number or 'no'} nodes"


def _known(pid: int | None) -> str:
    return "-" if pid is None else str(pid)


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s ago"
