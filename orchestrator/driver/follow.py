"""Follow a run in the terminal until it is over or a signal ends the command."""

import contextlib
import signal
from typing import Any

from orchestrator.driver.console import RunView
from orchestrator.driver.launch import Launched
from orchestrator.driver.signals import (
    Interrupt,
    discard,
    discard_closed_terminal,
    interrupts,
)
from ucp_core.errors import UcpError


def follow_run(run: Launched, view: RunView) -> tuple[dict[str, Any], signal.Signals | None]:
    """Show the run until it is over; return its summary, and the signal that stopped it.

    If this process started the cluster, the first signal (``interrupts``) stops the run at the next
    step boundary, and the second one at once; the cluster ends in both cases. Otherwise the first
    signal ends only this command, and the run continues. A terminal or pipe that has lost its
    reader counts as SIGHUP.

    Raises:
        CapacityError: The cluster is gone.
        Interrupt: A signal ended the command before the run was over.
    """
    follower = _Follower(run, view)
    try:
        with interrupts(follower.on_signal), view:
            summary = run.follow(follower.show)
            follower.print_logs(last=True)
            view.say_incidents(summary["incidents"])
    finally:
        if run.cluster is not None:
            (run.cluster.kill if follower.is_urgent else run.cluster.shutdown)()
    return summary, follower.first


class _Follower:
    """Shows status documents and rank 0's lines, and keeps signals until it can act on them."""

    def __init__(self, run: Launched, view: RunView) -> None:
        self._run = run
        self._view = view
        self._is_asked = False
        self.first: signal.Signals | None = None
        self.is_urgent = False

    def on_signal(self, number: signal.Signals) -> None:
        """Keep the first signal, to act on it between two status documents; a second one raises."""
        if number is signal.SIGHUP:
            discard_closed_terminal()
        if self.first is not None:
            self.is_urgent = True
            raise Interrupt(number)
        self.first = number

    def show(self, status: dict[str, Any] | None) -> None:
        """Show one status document; stop or leave the run if a signal came."""
        if self.first is not None and self._run.cluster is None:
            raise Interrupt(self.first)
        try:
            if self.first is not None and not self._is_asked:
                self._is_asked = True
                self._run.stop(f"{self.first.name} ended the command that runs it")
                self._view.say("stopping after this step; Ctrl-C again stops at once")
            self.print_logs()
            self._view.show(status)
        except (OSError, SystemExit):
            # The output has no reader left. Rich raises SystemExit for such a pipe.
            discard(self._view.file)
            self.first = self.first or signal.SIGHUP

    def print_logs(self, *, last: bool = False) -> None:
        """Print rank 0's output since the last call; with ``last``, all of it."""
        # Lines that cannot be read now are read later, or with `everstep logs`.
        with contextlib.suppress(UcpError):
            for line in self._run.logs.new_lines(now=last):
                self._view.print(line.text)
            if last:
                for line in self._run.logs.rest():
                    self._view.print(line.text)
