"""Skip, count and report updates whose loss or gradient norm is not finite.

Every rank decides from the sums of the step's own reduction, so all decide alike. Only if a sum is
not finite do they exchange where it comes from.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ucp_core.native import NOT_FINITE
from workers.errors import NotFiniteError
from workers.settings import IGNORE, STOP, NotFiniteSettings
from workers.train.executor.exchange import all_agree
from workers.train.executor.origin import Origin, Reduced, find_origin
from workers.train.executor.sharded_model import ShardedModel

#: Number of series of such updates that an attempt reports one by one; later it reports those whose
#: number is a power of two.
_ROWS_TOLD: Final = 8
#: With a larger scale a gradient may overflow because of the scale.
_SMALLEST_SCALE: Final = 1.0


class Finiteness:
    """Decides about updates that are not finite, in one attempt.

    ``tell`` is called with the step, a line for people, and the ranks concerned, equal on all
    ranks.
    """

    def __init__(
        self,
        settings: NotFiniteSettings,
        *,
        tell: Callable[[int, str, tuple[int, ...]], None],
    ) -> None:
        self._settings = settings
        self._tell_all, self._num_rows = tell, 0
        self.in_a_row = 0  #: Number of updates in a row, up to the last one, that are not finite.
        #: The newest step with finite weights, if they are not finite now.
        self._sound_step: int | None = None
        self._is_watched = False

    def load(self, extra: Mapping[str, Any]) -> None:
        """Continue from the small named values of a version; {} at the start of a run."""
        held = extra.get(NOT_FINITE, {})
        self.in_a_row = held.get("in_a_row", 0)
        self._sound_step = held.get("sound_step")

    def values(self) -> dict[str, Any]:
        """Return the values that a version keeps of this; {} if there are none."""
        kept = {"in_a_row": self.in_a_row or None, "sound_step": self._sound_step}
        told = {key: value for key, value in kept.items() if value is not None}
        return {NOT_FINITE: told} if told else {}

    def leaves_out(self, step: Reduced, sharded: ShardedModel) -> bool:
        """Return whether to skip the update, or raise if the run ends before it.

        Every rank calls it with its own part.
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
        self._judge(step, sharded)
        # A scaler never lets an optimizer take such a gradient.
        return self._settings.action != IGNORE or (scaler is not None and not has_norm)

    def _judge(self, step: Reduced, sharded: ShardedModel) -> None:
        """Report an update that is not finite, or raise if the run ends before it."""
        action, most = self._settings.action, self._settings.most
        self._num_rows += self.in_a_row == 1
        last = step.number - self.in_a_row
        if action == IGNORE:
            self._is_watched = self._sound_step is None
            if self.in_a_row == 1:
                where = find_origin(step, sharded)
                self._tell(
                    step.number,
                    where,
                    f"step {step.number} is not finite: {where.text}. The update was applied, "
                    "because of train.not_finite.action=ignore",
                )
            return
        where = find_origin(step, sharded)
        self._look(sharded, last - 1)
        broken = self._sound_step is not None
        if action == STOP or self.in_a_row >= most:
            num = self.in_a_row
            row = f"{num} updates in a row are not. " if num > 1 else ""
            raise NotFiniteError(
                f"step {step.number} is not finite: {where.text}. {row}The last "
                f"finite step is {last} (train.not_finite). {_advice(broken=broken)}",
                step=step.number,
                last_finite_step=last,
                ranks=where.ranks,
            )
        was = f". The weights are not finite since step {last}" if broken else ""
        self._tell(
            step.number,
            where,
            f"step {step.number} is not finite: {where.text}. The update was left out on all "
            f"workers; {most - self.in_a_row} more in a row end the run (train.not_finite){was}",
        )

    def _tell(self, step: int, origin: Origin, text: str) -> None:
        """Report the first series of updates, and then fewer and fewer."""
        num = self._num_rows
        if num <= _ROWS_TOLD or num & (num - 1) == 0:
            more = "" if num < _ROWS_TOLD else f" (number {num} so far)"
            self._tell_all(step, f"{text}{more}", origin.ranks)

    def updated(self, number: int, sharded: ShardedModel) -> None:
        """Check the weights if an update that is not finite was applied; every rank calls it."""
        if self._is_watched:
            self._look(sharded, number - 1)

    def _look(self, sharded: ShardedModel, sound_step: int) -> None:
        """Record whether the weights are finite, and since when they are not."""
        mine = all(
            bool(shard.local.isfinite().all())
            for shard in sharded.shards
            if shard.parameter.requires_grad
        )
        if all_agree(mine, sharded.device):
            self._sound_step = None
        elif self._sound_step is None:
            self._sound_step = max(0, sound_step)


def _advice(*, broken: bool) -> str:
    if broken:
        return (
            "Later weights are not finite: lower the learning rate or fix the data, and "
            "run it again with run.resume_from=finite; a script that runs alone resumes from "
            "the step before once the newer folders in checkpoints/ are deleted"
        )
    return (
        "The weights are those of that step: fix the data or the model and run it again; or allow "
        "more with train.not_finite.most"
    )
