"""What a run's capacity costs while nothing of it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import Context
from typing import Any

from orchestrator.shell.capacity import Capacity
from orchestrator.shell.names import RunNames


class _Loop(asyncio.SelectorEventLoop):
    """Counts what it is asked to wake for."""

    num_timers = 0

    def call_at(  # type: ignore[override]  # its callbacks have as many types as arguments
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.num_timers += 1
        return super().call_at(when, callback, *args, context=context)


def test_nothing_wakes_while_all_slots_are_placed() -> None:
    """A run nearly always has all its slots: to look for them then is work for nothing."""

    async def idle() -> None:
        capacity = Capacity(
            names=RunNames("r"), resources={"CPU": 1.0}, on_granted=lambda _slot, _node: None
        )
        polling = asyncio.create_task(capacity.poll_forever())
        for _ in range(10):
            await asyncio.sleep(0)
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling

    loop = _Loop()
    try:
        loop.run_until_complete(idle())
    finally:
        loop.close()

    assert loop.num_timers == 0
