"""Handle persistent buffers: state that no gradient changes, such as running statistics.

A buffer in ``state_dict`` is saved with every version, in its own dtype. If a step changes one, the
value after the step must not depend on the number of workers. So every micro-batch of a step begins
with the value before the step, and each must produce the same value. A buffer that depends on the
samples, such as BatchNorm's running mean, becomes the mean over all micro-batches if the script
declares it so. Otherwise an error names it.

The next forward pass may change buffers while a snapshot is copied. So a version saves a copy of
them, which changes only with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workers.collectives import on_host, settled
from workers.errors import TaskError
from workers.parallel import own_names
from workers.state.entries import DTYPES

_ADVICE = "keep it constant, or register it with persistent=False if losing its value is fine"


class PersistentBuffers:
    """The buffers of a model that are in its ``state_dict``.

    Changes are detected by version counters, addresses and identities: this takes about a
    microsecond per buffer and waits for no device. Writes through ``.data`` change none of these,
    so the first pass compares the bytes to find them.

    Args:
        averaged: Names, perhaps with ``*``, of buffers that become the mean over micro-batches.

    Attributes:
        have_changed: Whether a pass of the current step changed a buffer.

    Raises:
        TaskError: A name in ``averaged`` matches no buffer with floating values.
    """

    def __init__(self, model: nn.Module, averaged: Sequence[str] = ()) -> None:
        self._modules = dict(model.named_modules())
        self._dicts = [module._buffers for module in self._modules.values()]  # noqa: SLF001
        self._num_buffers = self._count()
        self._held = {held.fqn: held for held in self._look_up()}
        self._averaged = [h for h in self._held.values() if _is_one_of(h, averaged)]
        unused = [one for one in averaged if not any(_is_one_of(h, [one]) for h in self._averaged)]
        if unused:
            raise TaskError(
                f"session.model: average_buffers names {', '.join(unused)}, but no buffer with "
                f"floating values has such a name; there are {', '.join(self._held) or 'none'}"
            )
        self._equal = [
            held for held in self._held.values() if held.is_saved and held not in self._averaged
        ]
        #: Buffers that a pass writes undetected; None before the first pass.
        self._uncounted: list[_HeldBuffer] | None = None
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._sums: dict[int, Tensor] = {}
        self.have_changed = False

    def named(self) -> dict[str, Tensor]:
        """Return the saved copy of each buffer by name, always in the same memory."""
        return {held.fqn: held.kept for held in self._held.values() if held.is_saved}

    def restore(self) -> None:
        """Restore the model's values after the last step, which may have been loaded."""
        for held in self._held.values():
            held.restore()

    def begin_step(self, number: int) -> None:
        """Raise ``TaskError`` if a buffer has changed between steps: no version has the change."""
        self.have_changed, self._bounds, self._sums = False, None, {}
        for held in self._changed():
            raise self._refusal(held, number, "changed outside of a step, before step", _ADVICE)

    def begin_pass(self) -> None:
        """Begin a micro-batch with the values before the step."""
        if self.have_changed:
            for held in (*self._changed(), *(self._uncounted or ())):
                held.restore()

    def end_pass(self, micro_batch: int | None, step: int) -> None:
        """Record the changes that a pass made to the buffers.

        ``micro_batch`` is None if the pass does not count. Raise ``TaskError`` if there is a new
        buffer, or a buffer has another shape or dtype.
        """
        if self._uncounted is None:
            self._uncounted = [
                held for held in self._held.values() if held.is_saved and held.is_written_unseen()
            ]
        if self._count() != self._num_buffers:
            self._refuse_new(step)
        changed = [*self._changed(), *self._uncounted]
        if not changed:
            return
        for held in changed:
            if not held.keeps_form():
                raise self._refusal(held, step, "has another shape or dtype after step", _ADVICE)
        self.have_changed = True
        if self._equal:
            digests = self._digests(changed)
            low, high = self._bounds or (digests, digests)
            self._bounds = torch.minimum(low, digests), torch.maximum(high, digests)
        if micro_batch is not None and self._averaged:
            values = [held.value.detach().double().reshape(-1) for held in self._averaged]
            self._sums[micro_batch] = torch.cat(values)

    def refuse_changes(self, step: int) -> None:
        """Raise ``TaskError`` if a buffer has changed since ``begin_step``."""
        for held in self._changed():
            advice = f"write parallel.pp: 1, or {_ADVICE}"
            raise self._refusal(held, step, "changed in a pipeline in step", advice)

    def end_step(self, step: int, num_micro_batches: int, *, in_order: bool) -> None:
        """Agree on the values after a step. Every worker calls this if a buffer has changed.

        Args:
            num_micro_batches: Number of micro-batches of the step on all workers.
            in_order: Whether means have the same bits for any number of workers.

        Raises:
            TaskError: A buffer that is not averaged differs between micro-batches or workers.
        """
        if self._equal:
            self._check_equal(step)
        means = self._means(num_micro_batches, in_order=in_order)
        with torch.no_grad():
            for held in (*self._changed(), *(self._uncounted or ())):
                held.kept.copy_(held.value)
            for held, mean in zip(self._averaged, means, strict=True):
                held.kept.copy_(mean.view(held.kept.shape))
        self.restore()

    def _check_equal(self, step: int) -> None:
        low, high = self._bounds or (self._digests(()), self._digests(()))
        ends = torch.cat((low, -high))
        dist.all_reduce(ends, op=dist.ReduceOp.MIN)
        found, num = on_host(ends), len(low)
        for held, one, other in zip(self._equal, found[:num], found[num:], strict=True):
            if one != -other:
                advice = (
                    "if it is a mean over samples, let everstep average it: "
                    f'session.model(build, average_buffers=["{held.fqn}"]); else {_ADVICE}'
                )
                raise self._refusal(
                    held, step, "differs between micro-batches or workers after step", advice
                )

    def _digests(self, changed: Sequence[_HeldBuffer]) -> Tensor:
        """Return a number for each buffer that is not averaged; 0 if it has not changed."""
        device = self._equal[0].kept.device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack(
            [_digest(h.value).to(device) if h in changed else zero for h in self._equal]
        )

    def _changed(self) -> list[_HeldBuffer]:
        """Return the buffers whose values changed; a moved or converted tensor keeps its values."""
        found = [held for held in self._held.values() if held.has_changed()]
        for held in found:
            if held.is_replaced() and held.is_equal():
                held.look()
        return [held for held in found if held.has_changed()]

    def _means(self, num_micro_batches: int, *, in_order: bool) -> list[Tensor]:
        """Return the mean of each averaged buffer over the micro-batches of the step."""
        if not self._averaged:
            return []
        sizes = [held.kept.numel() for held in self._averaged]
        # As with losses, the rows of other workers are zero, so a sum over workers changes no bit.
        sums = torch.zeros(
            num_micro_batches if in_order else 1,
            sum(sizes),
            dtype=torch.float64,
            device=self._averaged[0].kept.device,
        )
        for micro_batch, values in sorted(self._sums.items()):
            sums[micro_batch if in_order else 0] += values
        dist.all_reduce(sums)
        # A snapshot after this step contains the new values, so they must have been checked.
        total = settled(sums)[0]
        for row in sums[1:]:
            total = total + row
        return list((total / num_micro_batches).split(sizes))

    def _count(self) -> int:
        return sum(map(len, self._dicts))

    def _look_up(self) -> Iterator[_HeldBuffer]:
        places = own_names(
            (f"{name}.{key}" if name else key, (key, module))
            for name, module in self._modules.items()
            for key in module._buffers  # noqa: SLF001
            if key not in module._non_persistent_buffers_set  # noqa: SLF001
        )
        for fqn, (key, module) in places.items():
            yield _HeldBuffer(fqn, key, module)

    def _refuse_new(self, step: int) -> None:
        self._num_buffers = self._count()
        for held in self._look_up():
            if held.fqn not in self._held:
                raise self._refusal(held, step, "is new in step", _ADVICE)

    def _refusal(self, held: _HeldBuffer, step: int, what: str, advice: str) -> TaskError:
        kinds = type(held.owner).__mro__
        # FSDP2 derives its own class from the module's class.
        kind = next(kind for kind in kinds if not issubclass(kind, FSDPModule)).__name__
        module = held.fqn[: -len(held.key)].rstrip(".")
        where = f"module {module} ({kind})" if module else f"the model ({kind})"
        return TaskError(
            f"buffer {held.key} of {where} {what} {step}. Its value would depend on the number of "
            f"workers, or be lost when the run resumes: {advice}",
            module=module,
            buffer=held.key,
            step=step,
        )


class _HeldBuffer:
    """A buffer and its saved value.

    Attributes:
        key: Its name in its module.
        tensor: Its tensor at the start; empty if it was registered without a value.
        is_saved: Whether a checkpoint can hold its values.
        kept: The saved value, from after the last step.
    """

    def __init__(self, fqn: str, key: str, owner: nn.Module) -> None:
        self.fqn, self.key, self.owner = fqn, key, owner
        tensor = self.now
        self.tensor = torch.empty(0) if tensor is None else tensor
        self.is_saved = tensor is not None and _is_plain(tensor) and tensor.dtype in DTYPES
        self.kept = self.tensor.detach().clone() if self.is_saved else self.tensor
        self.look()

    @property
    def now(self) -> Tensor | None:
        return self.owner._buffers.get(self.key)  # noqa: SLF001

    @property
    def value(self) -> Tensor:
        assert self.now is not None, f"{self.fqn} has lost its value"
        return self.now.detach()

    def look(self) -> None:
        self._seen = self.now
        self._mark = _mark(self._seen)

    def has_changed(self) -> bool:
        now = self.now
        return now is not self._seen or _mark(now) != self._mark

    def is_replaced(self) -> bool:
        return self.now is not self._seen

    def is_written_unseen(self) -> bool:
        """Return whether the values changed undetected."""
        return not self.has_changed() and not _same_bytes(self.kept, self.now)

    def keeps_form(self) -> bool:
        now = self.now
        if not self.is_saved or now is None:
            return False
        return _is_plain(now) and (now.shape, now.dtype) == (self.kept.shape, self.kept.dtype)

    def is_equal(self) -> bool:
        """Return whether the values are those after the last step, perhaps in another dtype."""
        now = self.now
        if not self.is_saved or now is None or now.shape != self.kept.shape:
            return False
        return torch.equal(self.kept.to(now), now)

    def restore(self) -> None:
        if self.is_saved:
            self.owner._buffers[self.key] = self.tensor  # noqa: SLF001
            with torch.no_grad():
                self.tensor.copy_(self.kept)
        self.look()


def _is_one_of(held: _HeldBuffer, patterns: Sequence[str]) -> bool:
    return (
        held.is_saved
        and held.tensor.is_floating_point()
        and any(fnmatchcase(held.fqn, pattern) for pattern in patterns)
    )


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    """Return version and address of a tensor; a write changes the version."""
    if tensor is None:
        return (0, 0)
    # torch raises for tensors that lack one of these.
    version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001
    return (version, tensor.data_ptr() if _is_plain(tensor) else 0)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _same_bytes(before: Tensor, now: Tensor | None) -> bool:
    """Return whether both have the same bits; a NaN equals itself."""
    if now is None or before.shape != now.shape or before.dtype != now.dtype:
        return False
    first, second = (one.detach().reshape(-1).view(torch.uint8) for one in (before, now))
    return torch.equal(first, second)


def _digest(tensor: Tensor) -> Tensor:
    """Return a number made of all bits of a tensor, int64 on its device; equal for equal bits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).long()
    places = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B97F4A7C1
    # The sum wraps around; a fourth of it can be negated.
    return ((flat + 1) * (places ^ (places >> 29))).sum() >> 2
