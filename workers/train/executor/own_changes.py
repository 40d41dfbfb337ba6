"""What a script does to gradients by itself, and would be lost or wrong without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from workers.errors import TaskError
from workers.parallel import LocalShard

__all__ = ["Marks", "marked", "refuse_changes", "refuse_hooks"]

#: Gradients of shards with how often each was written to.
Marks = Sequence[tuple[Tensor | None, int]]
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


def _mark(shard: LocalShard) -> tuple[Tensor | None, int]:
    gradient, local = shard.parameter.grad, shard.gradient
    if gradient is None or local is None:
        return None, 0
    # Writes through the model count in the sharded tensor, others in the local one.
    return local, gradient._version + local._version  # noqa: SLF001
