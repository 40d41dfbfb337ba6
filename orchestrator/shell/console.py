"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
            self._say("controller", "the controller does not answer; training goes on without it")
            return
        if self._said.pop("controller", None):
            self.say("the controller is back in charge")
        self._progress.update(self._task, completed=status["step"], facts=_facts(status))
        cause = status["cause"]
        if cause is not None:
            guilty = f" ({', '.join(cause['guilty'])})" if cause["guilty"] else ""
            self._say("cause", f"{cause['kind']}{guilty}: {cause['evidence']}", key=cause["at_s"])
        if status["phase"] == "running":
            self._say("attempt", _attempt_line(status), key=status["attempt"])
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._printed_s >= PLAIN_LINE_S:
            self._printed_s = now_s
            self.say(f"step {status['step']}/{self._total}  {_facts(status)}")

    def say(self, text: str) -> None:
        """Print one line above the live display."""
        line = f"[dim]{self._title}[/dim]  {text}"
        self._progress.console.print(line, highlight=False, soft_wrap=True)

    def _say(self, topic: str, text: str, *, key: Any = True) -> None:
        """Print ``text`` once per ``key`` of its topic."""
        if self._said.get(topic) != key:
            self._said[topic] = key
            self.say(text)


def _facts(status: dict[str, Any]) -> str:
    loss = f"loss {status['loss']:.4f}" if status["loss"] is not None else "loss -"
    num_training = sum(worker["rank"] >= 0 for worker in status["workers"])
    return f"{loss}  {num_training} workers  {status['phase']}"


def _attempt_line(status: dict[str, Any]) -> str:
    members = sorted(w["rank"] for w in status["workers"] if w["rank"] >= 0)
    pids = [w["pid"] for w in sorted(status["workers"], key=lambda w: w["rank"]) if w["rank"] >= 0]
    return (
        f"attempt {status['attempt']} trains on {len(members)} workers "
        f"({status['layout']}), pids {' '.join(map(str, pids))}"
    )
