"""Represent the training state of this rank as named local tensors, for saving and loading.

Trained weights are float32 masters. Each tensor that the optimizer keeps for a parameter is a slot
of the parameter, under the optimizer's own name (``exp_avg``). Its scalars (``step``) are small
named values. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ucp_core.geometry import Box
from ucp_core.native import LocalTensor
from ucp_core.reading import fresh_memory
from workers.errors import StateError
from workers.parallel import LocalShard
from workers.state.replica_shares import ReplicaShare, cut
from workers.state.whole_vectors import of_shard

#: The dtypes that a checkpoint can hold, by safetensors' names.
DTYPES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}


class HoldsState(Protocol):
    """An optimizer of torch, or several as one."""

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Return the state of every parameter that has state."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups."""


#: Tensors in the host buffer start at multiples of a cache line.
_ALIGN_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A box of one tensor of the state, as this rank holds it."""

    fqn: str
    slot: str  #: "weight", or the optimizer's name for it.
    shape: tuple[int, ...]
    box: Box  #: The elements of this rank.
    tensor: Tensor  #: The elements, on the training device.
    #: The ranks that hold these elements, with this one, in order; empty if only this rank does.
    replicas: tuple[int, ...] = ()

    def rows(self, box: Box) -> StateEntry:
        """Return the rows of the entry within ``box``, in the same memory."""
        if box == self.box:
            return self
        first = box.start[0] - self.box.start[0]
        return replace(self, box=box, tensor=self.tensor.narrow(0, first, box.shape[0]))

    def local_tensor(self, host: Tensor | None) -> LocalTensor:
        """Return the entry with its bytes in ``host``, contiguous on the CPU; None for no bytes."""
        return self.with_bytes(_memory(host) if host is not None else memoryview(b""))

    def with_bytes(self, data: memoryview) -> LocalTensor:
        """Return the entry with these bytes."""
        return LocalTensor(
            fqn=self.fqn,
            slot=self.slot,
            dtype=DTYPES[self.tensor.dtype],
            shape=self.shape,
            box=self.box,
            data=data,
        )


def local_parameters(shards: Sequence[LocalShard]) -> dict[str, nn.Parameter]:
    """Return a plain parameter that shares the memory of each shard, for the optimizer.

    Plain tensors keep no mesh alive and skip DTensor's dispatch, which takes longer than the update
    of a small parameter.
    """
    made: dict[str, nn.Parameter] = {}
    for shard in shards:
        # A 0-d parameter gets one row, so that the optimizer's tensors for it are not taken for
        # scalars.
        local = shard.local if shard.local.dim() else shard.local.view(1)
        own = nn.Parameter(local, requires_grad=shard.parameter.requires_grad)
        # Attributes such as ``_no_weight_decay`` are for the function that makes the optimizer.
        vars(own).update(vars(shard.parameter))
        made[shard.fqn] = own
    return made


def state_of(
    shards: Sequence[LocalShard],
    parameters: Mapping[str, nn.Parameter],
    optimizer: HoldsState,
) -> list[StateEntry]:
    """Return weights and optimizer slots, sorted by name and slot.

    Raise ``StateError`` if the optimizer keeps a value that is neither a scalar nor a tensor of its
    parameter's shape, or a tensor with a dtype or class that cannot be saved.
    """
    entries: list[StateEntry] = []
    for shard in shards:
        parameter = parameters[shard.fqn]
        slots = {"weight": shard.local}
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                raise StateError(
                    f"the optimizer's {name} of {shard.fqn} is of the class {type(value).__name__}"
                    f" ({type(value).__module__}), which is made for this worker's shard and "
                    "cannot be resharded; use one with plain tensors, as torch.optim.AdamW",
                    fqn=shard.fqn,
                    slot=name,
                )
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                if value.dtype not in DTYPES:
                    raise StateError(
                        f"the optimizer's {name} of {shard.fqn} is {value.dtype}; saved are "
                        f"{', '.join(map(str, DTYPES))}: this optimizer cannot be resumed",
                        fqn=shard.fqn,
                        slot=name,
                    )
                slots[name] = of_shard(value, shard.local)
            elif not _is_scalar(value):
                raise StateError(
                    f"the optimizer's {name} of {shard.fqn} is neither a number nor a tensor of "
                    f"shape {tuple(shard.local.shape)}; this optimizer cannot be resumed",
                    fqn=shard.fqn,
                    slot=name,
                )
        entries += [
            StateEntry(
                fqn=shard.fqn,
                slot=slot,
                shape=shard.shape,
                box=box,
                tensor=tensor,
                replicas=shard.replicas,
            )
            for slot, value in sorted(slots.items())
            for box, tensor in shard.pieces(value)
        ]
    return entries


def set_scalars(
    parameters: Mapping[str, nn.Parameter],
    optimizer: HoldsState,
    values: Mapping[str, Any],
) -> None:
    """Set the optimizer's scalars to what ``TrainingState.scalars`` returned.

    Parameters without optimizer state, which are frozen or in no group, are skipped.
    """
    for fqn, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for name, value in values.items():
            number = value.get(fqn) if isinstance(value, Mapping) else value
            if number is None or name not in state:
                continue
            held = state[name]
            if isinstance(held, Tensor):
                held.fill_(number)
            else:
                state[name] = type(held)(number)


class TrainingState:
    """The training state of this rank. Steps change the values, but not the tensors.

    Collecting the tensors takes as long as copying a few megabytes. So they are collected once, and
    again only if the optimizer holds other tensors.

    Args:
        rank: This rank. It saves a share of the tensors that others also hold.
        guards: Ranks that hold the same tensors and whose shares this rank also saves.
        elsewhere: Names of the parameters on other pipeline stages, by group of the optimizer; None
            without stages.
        buffers: Persistent buffers by name, whole, always in the same memory.
        sharers: The ranks that have these buffers, including this one, in order.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        parameters: Mapping[str, nn.Parameter],
        optimizer: HoldsState,
        rank: int = 0,
        guards: Sequence[int] = (),
        elsewhere: Sequence[Sequence[str]] | None = None,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        sharers: tuple[int, ...] = (),
    ) -> None:
        self._shards, self._parameters, self._optimizer = shards, parameters, optimizer
        self._rank, self._guards = rank, tuple(guards)
        self._elsewhere = elsewhere
        self._beside = [
            StateEntry(
                fqn=fqn,
                slot="weight",
                shape=tuple(tensor.shape),
                box=Box.full(tuple(tensor.shape)),
                tensor=tensor,
                replicas=sharers,
            )
            for fqn, tensor in (buffers or {}).items()
        ]
        held = [*(s.replicas for s in shards), *(entry.replicas for entry in self._beside)]
        self._is_alone = all(len(replicas) <= 1 for replicas in held)
        self._entries: list[StateEntry] | None = None
        self._empty: list[StateEntry] = []
        self._saved: list[StateEntry] = []
        self._guarded: tuple[tuple[int, list[StateEntry]], ...] = ()
        self._addresses: list[int] = []
        self._held: list[_Held] = []
        self._names = {id(parameter): fqn for fqn, parameter in parameters.items()}

    def add(self, entries: Sequence[StateEntry]) -> None:
        """Also save these values, always in the same memory, with weights and optimizer."""
        self._beside += entries
        self._entries = None

    def entries(self) -> list[StateEntry]:
        """Return all tensors, for loading, except those without elements.

        The list stays the same object while the tensors do. Raise ``StateError`` as ``state_of``
        does.
        """
        if self._entries is None or not all(map(self._is_as_before, self._held)):
            found = state_of(self._shards, self._parameters, self._optimizer)
            self._entries = [entry for entry in found if 0 not in entry.shape] + self._beside
            self._empty = [entry for entry in found if 0 in entry.shape]
            self._addresses = []
            self._held = [self._look_up(fqn) for fqn in self._parameters]
        return self._entries

    def saved(self) -> list[StateEntry]:
        """Return the share of ``entries`` that this rank saves; the list also stays the same."""
        entries = self.entries()
        if self._is_alone:
            return entries
        # If a tensor moves, views of it still point to the old memory.
        addresses = [entry.tensor.data_ptr() for entry in entries]
        if addresses != self._addresses:
            self._saved = []
            guarded: dict[int, list[StateEntry]] = {rank: [] for rank in self._guards}
            for replicas in dict.fromkeys(entry.replicas for entry in entries):
                sharing = ReplicaShare.of(replicas, self._rank, self._guards)
                alike = [entry for entry in entries if entry.replicas == replicas]
                shares = _shares(alike, sharing.num_shares)
                self._saved += shares[sharing.share]
                for rank, share in sharing.guarded:
                    guarded[rank] += shares[share]
            self._guarded = tuple(guarded.items())
            self._addresses = addresses
        return self._saved

    def guarded(self) -> tuple[tuple[int, list[StateEntry]], ...]:
        """Return the shares of other ranks that this rank saves, by rank; call ``saved`` first."""
        return self._guarded

    def without_elements(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return ``{name: {slot: [dtype, shape]}}`` of the tensors that have no elements.

        Call ``entries`` first. ``shapes`` are those of all parameters of the whole model, by name.
        Parameters on other stages are assumed to have the slots of parameters here.
        """
        found: dict[str, Any] = {name: {} for name, shape in shapes.items() if 0 in shape}
        for entry in self._empty if found else ():
            found[entry.fqn][entry.slot] = DTYPES[entry.tensor.dtype], entry.shape
        if self._elsewhere is not None:
            trained = {name for group in self._elsewhere for name in group}
            slots = {entry.slot: entry.tensor.dtype for entry in self._entries or ()}
            for name in found.keys() - self._parameters.keys():
                chosen = slots if name in trained else {"weight": torch.float32}
                found[name] = {slot: (DTYPES[chosen[slot]], shapes[name]) for slot in chosen}
        return found

    def scalars(self) -> dict[str, Any]:
        """Return the optimizer's scalars: one for all parameters, or by name if they differ.

        Call ``entries`` first. Raise ``StateError`` if the scalars differ and other stages have
        parameters, because only one rank's scalars can be saved.
        """
        found: dict[str, dict[str, float]] = {}
        for held in self._held:
            if held.scalars:
                state = self._optimizer.state[held.parameter]
                for name in held.scalars:
                    found.setdefault(name, {})[held.fqn] = state[name]
        for by_fqn in found.values():
            _read_together(by_fqn)
        return {name: self._together(name, by_fqn) for name, by_fqn in found.items()}

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups of all stages, with parameters by name."""
        groups = self._optimizer.param_groups
        named = [[self._names[id(parameter)] for parameter in group["params"]] for group in groups]
        if self._elsewhere is not None:
            pairs = zip(named, self._elsewhere, strict=True)
            named = [sorted([*here, *there]) for here, there in pairs]
        plain = [
            {key: one.item() if isinstance(one, Tensor) else one for key, one in group.items()}
            for group in groups
        ]
        return [{**group, "params": names} for group, names in zip(plain, named, strict=True)]

    def _together(self, name: str, by_fqn: Mapping[str, float]) -> Any:
        is_one = len(set(by_fqn.values())) == 1
        if self._elsewhere is None:
            is_whole = len(by_fqn) == len(self._parameters)
            return next(iter(by_fqn.values())) if is_one and is_whole else by_fqn
        if not is_one:
            low, high = (pick(by_fqn, key=by_fqn.__getitem__) for pick in (min, max))
            raise StateError(
                f"the optimizer's {name} is {by_fqn[low]} for {low} and {by_fqn[high]} for {high}; "
                "with parallel.pp above 1 it must be the same for all parameters: give each one a "
                "gradient in every step, or write parallel.pp: 1",
                slot=name,
            )
        return next(iter(by_fqn.values()))

    def _look_up(self, fqn: str) -> _Held:
        parameter = self._parameters[fqn]
        state = self._optimizer.state.get(parameter, {})
        scalars = tuple(name for name, value in state.items() if _is_scalar(value))
        tensors = tuple((name, value) for name, value in state.items() if name not in scalars)
        return _Held(fqn=fqn, parameter=parameter, scalars=scalars, tensors=tensors)

    def _is_as_before(self, held: _Held) -> bool:
        state = self._optimizer.state.get(held.parameter, {})
        return len(state) == len(held.scalars) + len(held.tensors) and all(
            state.get(name) is tensor for name, tensor in held.tensors
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The optimizer state of one parameter, as it was collected."""

    fqn: str
    parameter: nn.Parameter
    scalars: tuple[str, ...]
    tensors: tuple[tuple[str, Any], ...]


class HostBuffer:
    """A block of host memory for copies of a state; it is kept from attempt to attempt."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._bytes: list[memoryview] = []

    def views(self, entries: Sequence[StateEntry]) -> list[Tensor]:
        """Return a view of the block for every entry; overwrites earlier views."""
        # Most calls are for the same state, and making a view and its bytes takes 20 us.
        layout = [(entry.tensor.dtype, entry.tensor.shape) for entry in entries]
        if layout != self._layout:
            self._views = self._new_views(entries)
            self._bytes, self._layout = list(map(_memory, self._views)), layout
        return self._views

    def _new_views(self, entries: Sequence[StateEntry]) -> list[Tensor]:
        places: list[tuple[int, int]] = []
        end = 0
        for entry in entries:
            size_bytes = entry.tensor.numel() * entry.tensor.element_size()
            places.append((end, end + size_bytes))
            end += math.ceil(size_bytes / _ALIGN_BYTES) * _ALIGN_BYTES
        if len(self._block) < end:
            if any(entry.tensor.is_cuda for entry in entries):
                self._block = torch.empty(end, dtype=torch.uint8, pin_memory=True)
            else:
                self._block = torch.frombuffer(fresh_memory(end), dtype=torch.uint8)
        return [
            self._block[start:stop].view(entry.tensor.dtype).view(entry.tensor.shape)
            for entry, (start, stop) in zip(entries, places, strict=True)
        ]

    def staged(self, entries: Sequence[StateEntry]) -> dict[int, Tensor]:
        """Return a view of the block, by id, for every entry without contiguous host memory."""
        elsewhere = [one for one in entries if one.tensor.is_cuda or not one.tensor.is_contiguous()]
        # Without this, the next copy of the whole state would make its views again.
        views = self.views(elsewhere) if elsewhere else []
        return dict(zip(map(id, elsewhere), views, strict=True))

    def on_host(self, entries: Sequence[StateEntry]) -> list[LocalTensor]:
        """Return ``entries`` in place, or copied if they are not in contiguous host memory."""
        staged = self.staged(entries)
        for entry in entries:
            if id(entry) in staged:
                staged[id(entry)].copy_(entry.tensor)
        return [entry.local_tensor(staged.get(id(entry), entry.tensor)) for entry in entries]

    def capture(self, entries: Sequence[StateEntry]) -> list[LocalTensor]:
        """Return a copy of ``entries``."""
        mine = [entry for entry in entries if entry.tensor.numel()]
        views = self.views(mine)
        if mine:
            torch._foreach_copy_(views, [entry.tensor.detach() for entry in mine])
        return [entry.with_bytes(data) for entry, data in zip(mine, self._bytes, strict=True)]


def _shares(entries: Sequence[StateEntry], num_shares: int) -> list[list[StateEntry]]:
    """Return the shares of entries that the same ranks hold."""
    parts = [(entry.box, entry.tensor.element_size()) for entry in entries]
    return [
        [entries[number].rows(box) for number, box in share] for share in cut(parts, num_shares)
    ]


def _read_together(values: dict[str, Any]) -> None:
    """Replace scalars by their numbers, and read all scalars of a device in one transfer."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    values.update((name, float(value)) for name, value in values.items() if name not in tensors)
    for kind in {(one.device, one.dtype) for one in tensors.values()}:
        alike = [name for name, one in tensors.items() if (one.device, one.dtype) == kind]
        numbers: list[float] = torch.stack([tensors[name] for name in alike]).double().tolist()
        values.update(zip(alike, numbers, strict=True))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    # Loading writes into this memory, so it must be the tensor's.
    assert not flat.numel() or flat.data_ptr() == tensor.data_ptr(), "tensor is not contiguous"
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
