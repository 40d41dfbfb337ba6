"""What a script does to gradients by itself, and would be lost or wrong without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from workers.errors import TaskError
from workers.parallel import LocalShard

__all__ = [
    "Marks",
    "Probe",
    "marked",
    "probe_of",
    "refuse_changes",
    "refuse_clipped",
    "refuse_hooks",
    "refuse_unfrozen",
    "was_changed",
]

#: Gradients of shards with how often each was written to.
Marks = Sequence[tuple[Tensor | None, int]]
#: A shard, and a copy of its gradient.
Probe = tuple[LocalShard, Tensor]
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


def marked(shards: Sequence[LocalShard]) -> Marks:
    """Return what tells whether a gradient is changed from now on.

    Raises:
        TaskError: A parameter has a hook on its gradient.
    """
    refuse_hooks({shard.fqn: shard.parameter for shard in shards})
    return [_mark(shard) for shard in shards]


def refuse_changes(shards: Sequence[LocalShard], marks: Marks, step: int) -> None:
    """Raise ``TaskError`` if a gradient was changed since ``marks``; it may be dropped.

    Waits for no device.
    """
    for shard, (before, version) in zip(shards, marks, strict=False):
        now, written = _mark(shard)
        if now is not None and (now is not before or written != version):
            raise TaskError(
                f"step {step}: the gradient of {shard.fqn} was changed between step.backward and "
                f"step.apply, where it is a sum over tokens of this worker. {_ADVICE}",
                fqn=shard.fqn,
                step=step,
            )


def probe_of(shards: Sequence[LocalShard]) -> Probe | None:
    """Return the smallest gradient: torch 2.13 counts no writes of clip_grad_norm_, to all."""
    held = [(shard, one) for shard in shards if (one := shard.gradient) is not None and one.numel()]
    if not held:
        return None
    shard, gradient = min(held, key=lambda pair: pair[1].numel())
    return shard, gradient.clone()


def was_changed(probe: Probe | None, device: torch.device) -> Tensor:
    """Return 1.0 if the gradient is another one now, else 0.0, float64; waits for no device."""
    now = probe[0].gradient if probe is not None else None
    if probe is None or now is None:
        return torch.zeros(1, dtype=torch.float64, device=device)
    differs = (probe[1] != now) & ~(probe[1].isnan() & now.isnan())
    return differs.any().double().reshape(1)


def refuse_clipped(step: int) -> NoReturn:
    """Raise ``TaskError``: gradients were scaled."""
    raise TaskError(
        f"step {step}: gradients were changed between step.backward and step.apply, where each is "
        f"a sum over tokens of one worker. {_ADVICE}",
        step=step,
    )


def refuse_unfrozen(
    shards: Sequence[LocalShard], parameters: Mapping[str, nn.Parameter], step: int
) -> None:
    """Raise ``TaskError`` if a parameter trains that was frozen when the optimizer was made.

    A run that resumes allocates no optimizer state for it, and would lose what a version has.
    """
    for shard in shards:
        if shard.parameter.grad is not None and not parameters[shard.fqn].requires_grad:
            raise TaskError(
                f"step {step}: {shard.fqn} trains now, but was frozen when session.optimizer was "
                "called: its optimizer state would be lost when the run resumes. Freeze it after "
                "session.optimizer instead",
                fqn=shard.fqn,
                step=step,
            )


def _mark(shard: LocalShard) -> tuple[Tensor | None, int]:
    gradient, local = shard.parameter.grad, shard.gradient
    if gradient is None or local is None:
        return None, 0
    # Writes through the model count in the sharded tensor, others in the local one.
    return local, gradient._version + local._version  # noqa: SLF001
