"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from orchestrator.policies import RecoveryPlan
from ucp_core.numerics import format_bytes

#: Without a terminal, one line is printed this often.
PLAIN_LINE_S = 5.0


class RunView:
    """Shows the status documents of one run as they come.

    Args:
        console: Where to print.
        title: What to call the run.
        total_steps: Its length.
    """

    def __init__(self, console: Console, *, title: str, total_steps: int) -> None:
        self._console = console
        self._title = title
        self._total = total_steps
        self._said: dict[str, Any] = {}
        self._is_known = False
        self._printed_s = float("-inf")
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total_steps, facts="")

    def __enter__(self) -> Self:
        """Begin the live display."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the live display; what was printed stays."""
        self._progress.stop()

    def show(self, status: dict[str, Any] | None) -> None:
        """Take in one status document; None says that the controller does not answer."""
        if status is None:
            # One that has just started is slow to answer, and nothing is wrong with it.
            if self._is_known:
                goes_on = "; training goes on without it" if "attempt" in self._said else ""
                self._say("controller", f"the controller does not answer{goes_on}")
            return
        self._is_known = True
        if self._said.pop("controller", None):
            self.say("the controller is back in charge")
        self._progress.update(self._task, completed=status["step"], facts=_facts(status))
        cause = status["cause"]
        if cause is not None:
            guilty = f" ({', '.join(cause['guilty'])})" if cause["guilty"] else ""
            self._say("cause", f"{cause['kind']}{guilty}: {cause['evidence']}", key=cause["at_s"])
        if status["phase"] == "running":
            for line in status["passed_over"]:
                self._say(f"passed over {line}", f"passed over {line}", key=status["attempt"])
            self._say("attempt", _attempt_line(status), key=status["attempt"])
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._printed_s >= PLAIN_LINE_S:
            self._printed_s = now_s
            self.say(f"step {status['step']}/{self._total}  {_facts(status)}")

    def say(self, text: str, *, style: str = "") -> None:
        """Print one line above the live display."""
        # What peers and the system say has brackets of its own, which are no markup.
        line = Text.assemble((self._title, "dim"), "  ", (text, style))
        self._progress.console.print(line, soft_wrap=True)

    def _say(self, topic: str, text: str, *, key: Any = True) -> None:
        """Print ``text`` once per ``key`` of its topic."""
        if self._said.get(topic) != key:
            self._said[topic] = key
            self.say(text)


def _facts(status: dict[str, Any]) -> str:
    loss = f"loss {status['loss']:.4f}" if status["loss"] is not None else "loss -"
    num_training = sum(worker["rank"] >= 0 for worker in status["workers"])
    return f"{loss}  {num_training} workers  {status['phase']}"


def sources_text(sources: Mapping[str, int]) -> str:
    """Return from where how much was loaded, for people: ``3.2 MiB from local memory``."""
    return ", ".join(f"{format_bytes(size)} from {name}" for name, size in sources.items())


def print_plan(plan: RecoveryPlan, console: Console) -> None:
    """Print what would happen if machines were lost."""
    lines = [f"lost: {', '.join((*plan.lost_nodes, *plan.lost_workers)) or 'nothing'}"]
    if plan.step:
        lines.append(
            f"resumes after step {plan.step} of attempt {plan.attempt}, from {plan.source}; "
            f"{plan.lost_steps} steps are redone"
        )
        lines.append(f"loads {sources_text(plan.bytes_by_source)}")
    else:
        lines.append(f"begins anew: nothing is held anywhere; {plan.lost_steps} steps are redone")
    lines += [
        f"  part of rank {part.rank}: {format_bytes(part.size_bytes)} from {part.source}"
        + (f" of node {part.node}" if part.node else "")
        for part in plan.parts
    ]
    after = f"{plan.workers_after} ({plan.layout_after})" if plan.workers_after else "too few left"
    lines.append(f"workers: {plan.workers_before} now, then {after}")
    if not plan.workers_after:
        lines.append("training waits for new capacity")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_bounds(bounds_s: Mapping[str, float], patience: float, console: Console) -> None:
    """Print how long what is waited for at most, as it is known before the first step."""
    listing = ", ".join(f"{name} {seconds:g} s" for name, seconds in bounds_s.items())
    console.print(
        f"bounds of waits before the first step (recovery.patience={patience:g}; later ones "
        f"follow from the steps): {listing}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _attempt_line(status: dict[str, Any]) -> str:
    members = sorted(w["rank"] for w in status["workers"] if w["rank"] >= 0)
    pids = [w["pid"] for w in sorted(status["workers"], key=lambda w: w["rank"]) if w["rank"] >= 0]
    return (
        f"attempt {status['attempt']} trains on {len(members)} workers "
        f"({status['layout']}), pids {' '.join(map(str, pids))}"
        + (f"; loaded {sources_text(status['loaded'])}" if status["loaded"] else "")
    )
