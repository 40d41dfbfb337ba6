"""Refuses changes of gradients between backward and apply, which would be lost or wrong."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from workers.errors import TaskError
from workers.parallel import LocalShard

_ADVICE = (
    "To limit the norm set clip_norm; else change gradients in a hook of the optimizer "
    "(optimizer.register_step_pre_hook), where they are means over the global batch"
)


def refuse_hooks(named: Mapping[str, nn.Parameter]) -> None:
    """Raise ``TaskError`` if a parameter has a hook on its gradient, which would never run."""
    for fqn, parameter in named.items():
        if parameter._backward_hooks:  # noqa: SLF001  no other way to see them
            raise TaskError(
                f"parameter {fqn} has a hook (register_hook), which would never run: the gradient "
                f"is that of a gathered copy. {_ADVICE}",
                fqn=fqn,
            )


class Changes:
    """Detects whether a script changes gradients from now on; it may drop them."""

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        refuse_hooks({shard.fqn: shard.parameter for shard in shards})
        self._marks = [(shard, *_mark(shard)) for shard in shards]
        # torch 2.13 does not count the writes of clip_grad_norm_. They change all gradients, so
        # compare the smallest one.
        held = [(shard, one) for shard, one, _ in self._marks if one is not None and one.numel()]
        smallest = min(held, key=lambda pair: pair[1].numel(), default=None)
        self._probe = (smallest[0], smallest[1].clone()) if smallest is not None else None

    def refuse(self, step: int) -> None:
        """Raise ``TaskError`` if a gradient was written to; forget all. Waits for no device."""
        marks, self._marks = self._marks, []
        for shard, before, version in marks:
            now, written = _mark(shard)
            if now is not None and (now is not before or written != version):
                raise TaskError(
                    f"step {step}: the gradient of {shard.fqn} was changed between step.backward "
                    f"and step.apply, where it is a sum over tokens of this worker. {_ADVICE}",
                    fqn=shard.fqn,
                    step=step,
                )

    def are_seen(self, device: torch.device) -> Tensor:
        """Return 1.0 if the smallest gradient has changed, else 0.0, float64, ``(1,)``."""
        now = self._probe[0].gradient if self._probe is not None else None
        if self._probe is None or now is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        before = self._probe[1]
        differs = (before != now) & ~(before.isnan() & now.isnan())
        return differs.any().double().reshape(1)


def refuse_clipped(step: int) -> NoReturn:
    """Raise ``TaskError``: gradients were scaled."""
    raise TaskError(
        f"step {step}: gradients were changed between step.backward and step.apply, where each is "
        f"a sum over tokens of one worker. {_ADVICE}",
        step=step,
    )


def _mark(shard: LocalShard) -> tuple[Tensor | None, int]:
    gradient, local = shard.parameter.grad, shard.gradient
    if gradient is None or local is None:
        return None, 0
    # Writes through the model count in the sharded tensor, others in the local one.
    return local, gradient._version + local._version  # noqa: SLF001
