"""The state of the live model between a step and the next update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ucp_core.native import RELATIONS, WITHOUT_ELEMENTS
from workers.errors import TaskError
from workers.parallel import LocalShard
from workers.snapshot import Captured
from workers.state import CHANGED, UNSTARTED
from workers.train.executor import ShardedModel, Step

#: About this many values of each shard are compared.
_NUM_VALUES: Final = 64


@dataclass(slots=True)
class LiveState:
    """The state after a step; valid until the next update begins."""

    step: Step
    step_s: float
    sharded: ShardedModel  #: The model and optimizer.
    extra: Mapping[str, Any]  #: The small named values to save.
    versions: list[int] = field(init=False)  #: For every shard, how often it was written to.

    def __post_init__(self) -> None:
        self.versions = _versions(self.sharded.shards)

    def check(self) -> None:
        """Raise ``TaskError`` if a weight has changed since the update.

        A snapshot may hold a part of the change. Comparing version counters takes under a
        microsecond for ten parameters, and waits for no device. They do not count writes through
        ``.data``.
        """
        now = _versions(self.sharded.shards)
        if now == self.versions:
            return
        for shard, before, after in zip(self.sharded.shards, self.versions, now, strict=True):
            if before != after:
                raise TaskError(
                    f"parameter {shard.fqn} was changed between step.apply() of step "
                    f"{self.step.number} and the next one. No checkpoint of the step has the "
                    "change, so it would be lost when the run resumes. Change weights in a hook "
                    "of the optimizer (optimizer.register_step_post_hook), which step.apply() runs",
                    fqn=shard.fqn,
                    step=self.step.number,
                )


def capture(step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> Captured:
    """Return what to save of the state after ``step``; its tensors are not copied."""
    state = sharded.state
    saved = state.saved()
    empty = state.without_elements(sharded.shapes)
    return Captured(
        step=step,
        entries=saved,
        guarded=state.guarded(),
        extra={
            **extra,
            "optimizer": state.scalars(),
            CHANGED: sharded.optimizers.changed(),
            **({UNSTARTED: True} if sharded.optimizers.unstarted else {}),
            **({WITHOUT_ELEMENTS: empty} if empty else {}),
            RELATIONS: sharded.all_relations(),
            **sharded.trained.values(),
        },
        param_groups=state.param_groups(),
    )


class Marks:
    """Marks that detect a script's writes to weights: version counters, and a few values of each.

    The values detect writes through ``.data``, which no counter sees. This takes about 10 us per
    parameter.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards
        self._versions = _versions(shards)
        self._values = [few_values(shard.local) for shard in shards]

    def refuse_written(self) -> None:
        """Raise ``TaskError`` if something wrote to the weights before they have values."""
        fqn = self.written(frozen_too=True)
        if fqn is not None:
            raise TaskError(
                f"parameter {fqn} was written to before session.optimizer returned, which fills "
                "all weights: the values would be lost. Give them by build, initialise or "
                "init_from, or write after session.optimizer `if session.step == 0:`",
                fqn=fqn,
            )

    def written(self, *, frozen_too: bool) -> str | None:
        """Return the name of a parameter that was written to since; None if there is none.

        With ``frozen_too``, a write of the old values to a frozen parameter counts as well.
        """
        now = _versions(self._shards)
        marks = zip(self._shards, self._versions, now, self._values, strict=True)
        for shard, before, after, values in marks:
            is_counted = before != after and (frozen_too or shard.parameter.requires_grad)
            if is_counted or not torch.equal(values, few_values(shard.local)):
                return shard.fqn
        return None


def few_values(local: Tensor) -> Tensor:
    """Return a copy of some elements, as bytes, so that a NaN equals itself."""
    flat = local.reshape(-1)
    # The stride is odd; otherwise all elements could be in one column.
    few = flat[:: flat.numel() // _NUM_VALUES | 1]
    return few.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _versions(shards: Sequence[LocalShard]) -> list[int]:
    """Return how often each shard was written to, by the optimizer or through the model."""
    # The optimizer's parameter counts with ``local``.
    return [shard.parameter._version + shard.local._version for shard in shards]  # noqa: SLF001
