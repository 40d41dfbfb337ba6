"""The training state of this rank as named local tensors, for saving and loading.

Weights are float32 masters; every tensor that the optimizer keeps per parameter is a slot of
that parameter under the optimizer's own name (``exp_avg``); its scalars (``step``) are small
named values. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ucp_core.boxes import Box
from ucp_core.checkpoint import LocalTensor
from workers.errors import StateError
from workers.parallel.spread import Piece

__all__ = ["HostBuffer", "StateEntry", "local_parameters", "scalars", "set_scalars", "state_of"]

_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}
#: Tensors begin at multiples of this in the host buffer; a cache line.
_ALIGN_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of the state as this rank holds it.

    Attributes:
        fqn: Name of the parameter.
        slot: "weight" or the optimizer's name.
        shape: Of the whole tensor.
        box: This rank's part.
        tensor: The part itself, on the training device.
        replica: Whether another rank saves the same part.
    """

    fqn: str
    slot: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    replica: bool

    def local_tensor(self, host: Tensor) -> LocalTensor:
        """Return the entry with its bytes in ``host``, contiguous and on the CPU."""
        return LocalTensor(
            fqn=self.fqn,
            slot=self.slot,
            dtype=_DTYPES[self.tensor.dtype],
            shape=self.shape,
            box=self.box,
            data=_memory(host),
            replica=self.replica,
        )


def local_parameters(pieces: Sequence[Piece]) -> dict[str, nn.Parameter]:
    """Return a plain parameter for every piece, over the same memory, for the optimizer.

    Optimizers that see plain tensors skip DTensor's dispatch, which costs more than the update
    of a small parameter, and keep no mesh alive.
    """
    return {piece.fqn: nn.Parameter(piece.local) for piece in pieces}


def state_of(
    pieces: Sequence[Piece],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    replica: bool,
) -> list[StateEntry]:
    """Return weights and optimizer slots, sorted by name and slot.

    Raises:
        StateError: The optimizer keeps something that is neither a scalar nor shaped like its
            parameter.
    """
    entries: list[StateEntry] = []
    for piece in pieces:
        parameter = parameters[piece.fqn]
        slots = {"weight": piece.local}
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                slots[name] = value
            elif not _is_scalar(value):
                raise StateError(
                    f"the optimizer's {name} of {piece.fqn} is neither a number nor a tensor of "
                    f"shape {tuple(parameter.shape)}; this optimizer cannot be resumed",
                    fqn=piece.fqn,
                    slot=name,
                )
        entries += [
            StateEntry(
                fqn=piece.fqn, slot=slot, shape=piece.shape, box=piece.box, tensor=value,
                replica=replica,
            )
            for slot, value in sorted(slots.items())
        ]  # fmt: skip
    return entries


def scalars(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the optimizer's numbers: one for all parameters, or by name where they differ."""
    found: dict[str, dict[str, float]] = {}
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if _is_scalar(value):
                found.setdefault(name, {})[fqn] = float(value)
    return {
        name: next(iter(by_fqn.values()))
        if len(by_fqn) == len(parameters) and len(set(by_fqn.values())) == 1
        else by_fqn
        for name, by_fqn in found.items()
    }


def set_scalars(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Any],
) -> None:
    """Put back what ``scalars`` returned, into numbers that the optimizer has already."""
    for fqn, parameter in parameters.items():
        state = optimizer.state[parameter]
        for name, value in values.items():
            number = value[fqn] if isinstance(value, Mapping) else value
            held = state[name]
            if isinstance(held, Tensor):
                held.fill_(number)
            else:
                state[name] = type(held)(number)


class HostBuffer:
    """One block of host memory that takes copies of a state; kept from attempt to attempt."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def views(self, entries: Sequence[StateEntry]) -> list[Tensor]:
        """Return a view of the block for every entry; what was there before is lost."""
        places: list[tuple[int, int]] = []
        end = 0
        for entry in entries:
            size_bytes = entry.tensor.numel() * entry.tensor.element_size()
            places.append((end, end + size_bytes))
            end += math.ceil(size_bytes / _ALIGN_BYTES) * _ALIGN_BYTES
        if len(self._block) < end:
            pinned = any(entry.tensor.is_cuda for entry in entries)
            self._block = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return [
            self._block[start:stop].view(entry.tensor.dtype).view(entry.tensor.shape)
            for entry, (start, stop) in zip(entries, places, strict=True)
        ]

    def capture(self, entries: Sequence[StateEntry]) -> list[LocalTensor]:
        """Return a copy of what this rank has to save, taken now."""
        mine = [entry for entry in entries if not entry.replica and entry.tensor.numel()]
        views = self.views(mine)
        if mine:
            torch._foreach_copy_(views, [entry.tensor.detach() for entry in mine])
        return [entry.local_tensor(view) for entry, view in zip(mine, views, strict=True)]


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    # A view: what is loaded into it has to arrive in the tensor.
    assert not flat.numel() or flat.data_ptr() == tensor.data_ptr(), "tensor is not contiguous"
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
