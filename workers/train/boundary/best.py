"""Decide which versions to keep because a value was best after their steps.

Each version names the best steps up to its own (``ucp_core.native.best_steps``). So the newest
version that counts decides, whichever processes have died. A best step is committed before training
continues, so the loss of a node loses no best version.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ucp_core.native import BEST
from workers.errors import TaskError
from workers.settings import VALIDATION_LOSS, BestSettings
from workers.train.executor import by_rank

#: A step and the value after it.
_Measured = tuple[int, float]


def ranked(
    kept: Sequence[_Measured], new: _Measured, *, mode: Literal["min", "max"], keep: int
) -> tuple[_Measured, ...]:
    """Return the ``keep`` best of ``kept`` and ``new``, best first; among equals the earlier."""
    sign = 1 if mode == "min" else -1
    return tuple(sorted([*kept, new], key=lambda one: (sign * one[1], one[0])))[:keep]


class Best:
    """The best steps so far, as every rank of one attempt knows them."""

    def __init__(self, settings: BestSettings, device: torch.device) -> None:
        self.settings = settings  #: The value to compare; "" for none.
        self.is_new = False  #: Whether the last step is among the best.
        self._is_configured = bool(settings.value)
        self._device = device
        self._value = math.nan
        self._held: Mapping[str, Any] = {}

    def load(self, extra: Mapping[str, Any]) -> None:
        """Continue from the small named values of a version; {} at the start of a run."""
        self._held = extra.get(BEST, {})

    def choose(self, value: str, mode: Literal["min", "max"], keep: int) -> None:
        """Accept a script's choice, unless the configuration says what to keep."""
        wanted = BestSettings(value=value, mode=mode, keep=keep)
        chosen = self.settings
        if self._is_configured and (chosen.value, chosen.mode) != (value, mode):
            raise TaskError(
                f"session.keep_best({value!r}, mode={mode!r}): the configuration says "
                f"checkpoint.best: {{value: {chosen.value}, mode: {chosen.mode}}}; make them equal "
                "or remove one"
            )
        self.settings = chosen if self._is_configured else wanted

    @property
    def kept(self) -> tuple[_Measured, ...]:
        """Return the best steps and their values, best first."""
        wanted = (self.settings.value, self.settings.mode)
        if (self._held.get("value"), self._held.get("mode")) != wanted:
            return ()
        return tuple((step, value) for step, value in self._held["kept"])

    def note(self, name: str, value: float) -> None:
        """Record a value of the step whose body is running."""
        if name == self.settings.value:
            self._value = value

    def take(self, step: int) -> dict[str, Any]:
        """Decide about a step whose body has ended; return the values to keep in its version.

        Every rank calls it.
        """
        settings, value = self.settings, self._value
        self._value, self.is_new = math.nan, False
        if not settings.value:
            return {}
        if settings.value != VALIDATION_LOSS:
            # Values that other ranks log do not count.
            value = by_rank(torch.tensor(value, dtype=torch.float64, device=self._device))[0]
        kept = self.kept
        if math.isfinite(value):
            kept = ranked(kept, (step, value), mode=settings.mode, keep=settings.keep)
            self.is_new = (step, value) in kept
        told = {"value": settings.value, "mode": settings.mode, "kept": [list(one) for one in kept]}
        self._held = told
        return {BEST: told}

    def described(self) -> dict[str, Any]:
        """Return the best step, for the result of the run; {} without one."""
        if not self.kept:
            return {}
        step, value = self.kept[0]
        return {"best": {"step": step, self.settings.value: value}}
