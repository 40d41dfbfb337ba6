"""Repeat ``everstep run`` until the run has ended, on one or several clusters.

Each try is an ``everstep run`` in a separate process, because Ray silently ends a driver process a
minute after its head is gone.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from signal import Signals
from typing import Any, NamedTuple

from orchestrator.config import RunConfig
from orchestrator.driver.run import Run
from orchestrator.driver.signals import Interrupt, interrupts
from orchestrator.errors import CapacityError
from ucp_core.errors import UcpError


class Watched(NamedTuple):
    """How a run ended."""

    code: int | None  #: Exit code of the command that reported the end; None if none did.
    summary: dict[str, Any] | None  #: The run's summary; None if it is not over.


def watch_run(
    commands: Sequence[Sequence[str]],
    config: RunConfig,
    *,
    is_final: Callable[[int, int], bool],
    say: Callable[[str], None],
) -> Watched:
    """Repeat the commands until the run has ended.

    A signal (``interrupts``) goes to the current command, and no other try follows.

    Args:
        commands: Each runs it on another cluster; the commands take turns.
        is_final: Returns, from the exit code of a command and the number of tries before it,
            whether another try would end the same.
        say: Called with a line for people before each pause.

    Raises:
        CapacityError: Nothing was saved for as long as the run may wait for workers, or it was
            killed.
        Interrupt: A signal ended a pause.
    """
    run, tries = Run(config.run.directory), _Tries()
    first = before = _seen(run, _Contents())
    num_failed, saved_s = 0, time.monotonic()
    with interrupts(tries.on_signal):
        for num_before, command in enumerate(cycle(commands)):
            code = tries.run(command)
            now = _seen(run, before)
            is_over = now.is_over_since(first)
            if tries.is_ending or is_final(code, num_before) or (is_over and code >= 0):
                return Watched(code=code if code >= 0 else 128 - code, summary=now.summary)
            if now.saves != before.saves:
                num_failed, saved_s = 0, time.monotonic()
            wait_s = config.recovery.capacity_wait_s
            if time.monotonic() - saved_s > wait_s:
                raise CapacityError(f"no cluster advanced the run for {wait_s:g} s")
            if not is_over:
                say(f"trying again in {pause_s(num_failed):g} s; Ctrl-C cancels")
                time.sleep(pause_s(num_failed))
                num_failed += 1
            before = _seen(run, now)
            if before.is_over_since(first):  # It ended after the command did.
                return Watched(code=None, summary=before.summary)
    raise AssertionError("unreachable: there is a command")


def pause_s(num_failed: int) -> float:
    """Return how long to wait after ``num_failed`` tries in a row that saved nothing.

    A head boots within about a minute, and each try takes seconds of a core.
    """
    return min(2.0**num_failed, 60.0)


class _Contents(NamedTuple):
    """The content of a run directory, in the values that methods of ``Run`` return."""

    summary: dict[str, Any] | None = None
    killed_at: float | None = None
    saves: tuple[str, ...] = ()

    def is_over_since(self, first: _Contents) -> bool:
        """Return whether the run has ended since ``first``.

        Raise ``CapacityError`` if it was killed: it must not restart.
        """
        if self.killed_at not in (None, first.killed_at):
            raise CapacityError("the run was ended by force; the same command resumes it")
        return self.summary is not None and self.summary != first.summary


def _seen(run: Run, before: _Contents) -> _Contents:
    """Return the current content, or ``before`` if storage does not answer."""
    with contextlib.suppress(UcpError):
        return _Contents(run.summary(), run.killed_at(), run.saves())
    return before


class _Tries:
    """Runs one command at a time and passes signals on to it; the first one ends the tries."""

    is_ending = False
    _process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        # In a separate session; otherwise Ctrl-C in a terminal would reach it twice.
        self._process = subprocess.Popen(command, start_new_session=True)  # noqa: S603  our own
        try:
            return self._process.wait()
        finally:
            self._process = None

    def on_signal(self, number: Signals) -> None:
        self.is_ending = True
        if self._process is None:
            raise Interrupt(number)
        self._process.send_signal(number)
