"""Detect a model that keeps state in its buffers, which no checkpoint holds.

After a resume, buffers have the values of the model's builder. A counter, running statistics, or
the vectors of ``spectral_norm`` would silently restart, and differ between workers before that.
Buffers that are not persistent may change: they are for caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workers.errors import TaskError

__all__ = ["PersistentBuffers"]


class PersistentBuffers:
    """The buffers of a model that are in its ``state_dict``, as they were at the start.

    Changes are detected by version counters, addresses and identities: this takes about a
    microsecond per buffer and waits for no device. Writes through ``.data`` are not counted; the
    first check compares the bytes to find them.

    Args:
        model: The model, filled and not used yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._dicts = [module._buffers for module in self._modules.values()]  # noqa: SLF001
        self._num_buffers = self._count()
        self._held = {held.fqn: held for held in self._look_up()}
        self._first = {
            fqn: held.tensor.clone()
            for fqn, held in self._held.items()
            if held.tensor is not None and _is_plain(held.tensor)
        }

    def check(self, step: int) -> None:
        """Do nothing if no buffer has changed.

        Args:
            step: The last step that was applied.

        Raises:
            TaskError: A buffer has changed, or there is a new one.
        """
        if self._first:
            first, self._first = self._first, {}
            for fqn, value in first.items():
                held = self._held[fqn]
                # The check below handles another tensor.
                if held.now() is held.tensor and not _same_bytes(value, held.tensor):
                    raise self._refusal(held, step)
        if self._count() == self._num_buffers and all(map(_is_as_before, self._held.values())):
            return
        found = {held.fqn: held for held in self._look_up()}
        for fqn, held in found.items():
            before = self._held.get(fqn)
            if before is None or not (_is_as_before(before) or _is_equal(before, held.tensor)):
                raise self._refusal(held, step)
        self._num_buffers, self._held = self._count(), found

    def _count(self) -> int:
        return sum(map(len, self._dicts))

    def _look_up(self) -> Iterator[_Held]:
        for name, module in self._modules.items():
            for key, tensor in module._buffers.items():  # noqa: SLF001
                if key not in module._non_persistent_buffers_set:  # noqa: SLF001
                    yield _Held(
                        module=name,
                        key=key,
                        buffers=module._buffers,  # noqa: SLF001
                        tensor=tensor,
                        mark=_mark(tensor),
                    )

    def _refusal(self, held: _Held, step: int) -> TaskError:
        kinds = type(self._modules[held.module]).__mro__
        # FSDP2 derives a class of its own from the module's class.
        kind = next(kind for kind in kinds if not issubclass(kind, FSDPModule)).__name__
        where = f"module {held.module} ({kind})" if held.module else f"the model ({kind})"
        return TaskError(
            f"buffer {held.key} of {where} had changed after step {step}; buffers are not saved: "
            "its value would be lost when the run resumes, and it depends on the number of "
            "workers. Use a module that keeps no such state, or register the buffer with "
            "persistent=False if losing its value is fine",
            module=held.module,
            buffer=held.key,
            step=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A buffer at the start.

    Attributes:
        module: Name of its module.
        key: Its name in the module.
        buffers: The module's live dictionary of buffers.
        tensor: Its tensor; None if it was registered without a value.
        mark: Version and address of ``tensor``, which a write changes.
    """

    module: str
    key: str
    buffers: dict[str, Tensor | None]
    tensor: Tensor | None
    mark: tuple[int, int]

    @property
    def fqn(self) -> str:
        return f"{self.module}.{self.key}"

    def now(self) -> Tensor | None:
        return self.buffers.get(self.key)


def _is_as_before(held: _Held) -> bool:
    now = held.now()
    return now is held.tensor and _mark(now) == held.mark


def _is_equal(before: _Held, now: Tensor | None) -> bool:
    """Return whether ``now`` is another tensor with the same value, such as a moved one."""
    was = before.tensor
    if was is None or now is None or was is now or _mark(was) != before.mark:
        return False
    return was.shape == now.shape and torch.equal(was.to(now), now)


def _mark(tensor: Tensor | None) -> tuple[int, int]:
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
    first, second = (one.reshape(-1).view(torch.uint8) for one in (before, now.detach()))
    return torch.equal(first, second)
