"""Updates whose loss or gradient norm is not finite: left out, counted, and told.

Every rank decides from the sums of the step's own reduction, so all decide alike. Only when one is
not finite they ask each other where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ucp_core.native import NOT_FINITE
from workers.errors import NotFiniteError
from workers.settings import IGNORE, STOP, NotFiniteSettings
from workers.train.executor.sharded_model import ShardedModel
from workers.train.executor.signals import all_agree, on_host

#: So many micro-batches are named.
_TOLD: Final = 8
#: So many rows of updates are told in an attempt, and then those whose number is a power of two.
_ROWS_TOLD: Final = 8
#: With a larger scale a gradient may overflow because of the scale.
_SMALLEST_SCALE: Final = 1.0


class Reduced(Protocol):
    """The facts about a step when its sums are reduced."""

    number: int
    loss: float
    grad_norm: float
    tokens: int


class Finiteness:
    """Decides about updates that are not finite, in one attempt.

    Args:
        settings: What to do with them.
        num_micro_batches: Micro-batches of a step over all workers.
        tell: Called with the step and a line for people, equal on all ranks.

    Attributes:
        in_a_row: How many updates so far, the last one included, are not finite.
    """

    def __init__(
        self,
        settings: NotFiniteSettings,
        num_micro_batches: int,
        *,
        tell: Callable[[int, str], None],
    ) -> None:
        self._settings = settings
        self._num_micro_batches = num_micro_batches
        self._tell_all, self._num_rows = tell, 0
        self.in_a_row = 0
        #: The newest step behind which the weights are finite, if they are not now.
        self._sound_step: int | None = None
        self._is_watched = False

    def load(self, extra: Mapping[str, Any]) -> None:
        """Continue from the small named values of a version; {} at the start of a run."""
        held = extra.get(NOT_FINITE, {})
        self.in_a_row = held.get("in_a_row", 0)
        self._sound_step = held.get("sound_step")

    def values(self) -> dict[str, Any]:
        """Return what a version keeps of this; {} as long as there is nothing to keep."""
        kept = {"in_a_row": self.in_a_row or None, "sound_step": self._sound_step}
        told = {key: value for key, value in kept.items() if value is not None}
        return {NOT_FINITE: told} if told else {}

    def leaves_out(
        self, step: Reduced, sums: Mapping[int, tuple[Tensor, int]], sharded: ShardedModel
    ) -> bool:
        """Return whether the update is left out. Every rank calls it with its own sums.

        Raises:
            NotFiniteError: The run is to end before this update.
        """
        scaler = sharded.registered.scaler
        has_loss = math.isfinite(step.loss) or not step.tokens
        has_norm = math.isfinite(step.grad_norm)
        self._is_watched = False
        if has_loss and has_norm:
            self.in_a_row = 0
            return False
        if has_loss and scaler is not None and scaler.get_scale() > _SMALLEST_SCALE:
            # The scaler tries a smaller scale.
            return True
        self.in_a_row += 1
        self._judge(step, sums, sharded)
        # A scaler never lets an optimizer take such a gradient.
        return self._settings.action != IGNORE or (scaler is not None and not has_norm)

    def _judge(
        self, step: Reduced, sums: Mapping[int, tuple[Tensor, int]], sharded: ShardedModel
    ) -> None:
        """Tell of an update that is not finite, or raise if the run ends before it."""
        action, most = self._settings.action, self._settings.most
        self._num_rows += self.in_a_row == 1
        last = step.number - self.in_a_row
        if action == IGNORE:
            self._is_watched = self._sound_step is None
            if self.in_a_row == 1:
                where = _where(sums, sharded, self._num_micro_batches)
                self._tell(
                    step.number,
                    f"step {step.number} is not finite: {where}. The update was made all the same, "
                    "as train.not_finite.action=ignore says",
                )
            return
        where = _where(sums, sharded, self._num_micro_batches)
        self._look(sharded, last - 1)
        broken = self._sound_step is not None
        if action == STOP or self.in_a_row >= most:
            raise NotFiniteError(
                f"step {step.number} is not finite: {where}. {_row(self.in_a_row)}the last finite "
                f"step is {last} (train.not_finite). {_advice(broken=broken)}",
                step=step.number,
                last_finite_step=last,
            )
        was = f". The weights are not finite since step {last}" if broken else ""
        self._tell(
            step.number,
            f"step {step.number} is not finite: {where}. The update was left out on all workers; "
            f"{most - self.in_a_row} more in a row end the run (train.not_finite){was}",
        )

    def _tell(self, step: int, text: str) -> None:
        """Tell, but of data that is often not finite ever more seldom."""
        num = self._num_rows
        if num <= _ROWS_TOLD or num & (num - 1) == 0:
            self._tell_all(step, text if num < _ROWS_TOLD else f"{text} (number {num} so far)")

    def updated(self, number: int, sharded: ShardedModel) -> None:
        """Look at the weights if an update was made that is not finite; every rank calls it."""
        if self._is_watched:
            self._look(sharded, number - 1)

    def _look(self, sharded: ShardedModel, sound_step: int) -> None:
        """Note whether the weights are finite, and since when they are not."""
        mine = all(
            bool(shard.local.isfinite().all())
            for shard in sharded.shards
            if shard.parameter.requires_grad
        )
        if all_agree(mine, sharded.device):
            self._sound_step = None
        elif self._sound_step is None:
            self._sound_step = max(0, sound_step)


def _where(
    sums: Mapping[int, tuple[Tensor, int]], sharded: ShardedModel, num_micro_batches: int
) -> str:
    """Return which micro-batches, or else gradients, are not finite. Every rank calls it."""
    names = sorted(sharded.shapes)
    flags = torch.zeros(num_micro_batches + len(names), device=sharded.device)
    for micro_batch, (loss, _) in sums.items():
        flags[micro_batch] = float(not math.isfinite(float(loss)))
    places = {name: num_micro_batches + at for at, name in enumerate(names)}
    for shard in sharded.shards:
        gradient = shard.gradient
        if gradient is not None and not gradient.isfinite().all():
            flags[places[shard.fqn]] = 1.0
    dist.all_reduce(flags)
    found = on_host(flags)
    losses = [at for at, flag in enumerate(found[:num_micro_batches]) if flag]
    if losses:
        return f"the loss of {described_numbers(losses, num_micro_batches)}"
    gradients = [name for name, at in places.items() if found[at]]
    if not gradients:
        return "the gradient norm overflows"
    more = f" and of {len(gradients) - 1} more" if gradients[1:] else ""
    return f"the gradient of {gradients[0]}{more}, with a finite loss"


def described_numbers(found: list[int], num: int) -> str:
    """Return micro-batches for people, counted from 1."""
    named = ", ".join(str(at + 1) for at in found[:_TOLD])
    more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return f"micro-batch{'es' if found[1:] else ''} {named}{more} of {num}"


def _row(in_a_row: int) -> str:
    return f"{in_a_row} updates in a row are not; " if in_a_row > 1 else ""


def _advice(*, broken: bool) -> str:
    if broken:
        return (
            "The weights behind that are not finite: lower the learning rate or mend the data, and "
            "run it again with run.resume_from=finite; a script that runs alone resumes from "
            "the step before once the newer folders in checkpoints/ are deleted"
        )
    return (
        "The weights are those of that step: mend the data or the model and run it again; or allow "
        "more with train.not_finite.most"
    )
