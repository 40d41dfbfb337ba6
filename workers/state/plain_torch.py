"""Represent the state of a plain torch script: its model and optimizers, perhaps as DTensors.

Names are torch's own, as ``get_model_state_dict`` returns them. Nothing here communicates. The mesh
of a DTensor shows which of its ranks hold the same elements, and ``DistributedDataParallel`` shows
which ranks hold the same model. It is unknown whether other plain tensors, or tensors on a mesh of
other ranks, are copies: each rank saves its own, and the commit keeps one.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ucp_core.geometry import Box
from workers.errors import StateError
from workers.parallel import LocalShard, boxes_of, cuts_of, is_whole, own_names
from workers.state.entries import DTYPES, TrainingState, set_scalars

#: Boxes, and ranks with the same elements, by how a DTensor is placed. Finding the ranks takes
#: 150 us, and most tensors of a model are placed alike.
_Places = dict[Hashable, tuple[tuple[Box, ...], tuple[int, ...]]]
#: Name in a state dict of a module's value that is not a tensor.
_EXTRA_STATE = "_extra_state"


class PlainState:
    """The state of a model, or of a part of it, and of its optimizers on this rank.

    ``is_alone`` says that this rank saves the whole state alone.

    Attributes:
        module: The model without ``DistributedDataParallel``.
        parameters: The model's parameters by name; a shared one occurs once.
        shards: This rank's part of each parameter and persistent buffer, in place.
        training: The tensors of the state: the shards and the optimizers' tensors.
        roles: "frozen" or "buffer", by name.
        ties: The first name of a shared parameter, by its other names.

    Raises:
        StateError: A part of the state cannot be saved. The error names it.
    """

    # Without gradients, ``to_local`` does not go through autograd.
    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        rank: int,
        *,
        is_alone: bool,
    ) -> None:
        self.module, holders = _unwrapped(model)
        _refuse_wrapped(self.module)
        # This comes first, because it makes FSDP2 drop gathered parameters. Torch's
        # ``get_model_state_dict`` returns the same, but finds names twice.
        tensors = own_names(self.module.state_dict().items())
        every = own_names(self.module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self.ties = {
            name: first[id(one)]
            for name, one in every.items()
            if first.setdefault(id(one), name) != name
        }
        self.parameters = {name: one for name, one in every.items() if name not in self.ties}
        self.optimizers = optimizers
        held = own_names(self.module.named_buffers(remove_duplicate=False)).keys() | every.keys()
        extra = {name for name in tensors if name.endswith(_EXTRA_STATE)}
        unknown = sorted(self.parameters.keys() - tensors.keys() | tensors.keys() - held - extra)
        if unknown:
            raise StateError(
                f"{unknown[0]} has another name in the model's state dict: a hook renames it",
                fqn=unknown[0],
            )
        self.roles: dict[str, str] = {}
        self.shards: dict[str, LocalShard] = {}
        places: _Places = {}
        for name in sorted(tensors.keys() - self.ties.keys()):
            parameter = self.parameters.get(name)
            if parameter is None:
                self.roles[name] = "buffer"
            elif not parameter.requires_grad:
                self.roles[name] = "frozen"
            # A buffer, such as a running mean, may differ between ranks; the commit keeps one
            # rank's.
            replicas = () if is_alone or parameter is None else holders
            self.shards[name] = _shard(name, tensors[name], replicas, places, is_alone=is_alone)
        self._parts = {name: shard.local for name, shard in self.shards.items()}
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        #: State as an optimizer holds it, but with this rank's part of each parameter as the key.
        self.state: dict[Any, dict[str, Any]] = {}
        self.param_groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            self._add(optimizer)
        parts: Any = self._parts
        self.training = TrainingState([*self.shards.values()], parts, self, rank)

    def _add(self, optimizer: optim.Optimizer) -> None:
        """Add an optimizer's state, with this rank's part of each tensor."""
        names = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        state: Any = optimizer.state
        own = [key for key in state if not isinstance(key, Tensor)]
        if own:
            raise StateError(
                f"{type(optimizer).__name__} keeps {own[0]!r} in its state, which belongs to no "
                "parameter and cannot be saved"
            )
        for group in optimizer.param_groups:
            found = [(names.get(id(parameter), ""), parameter) for parameter in group["params"]]
            for fqn, parameter in found:
                if not fqn:
                    raise StateError(
                        f"{type(optimizer).__name__} updates a parameter of shape "
                        f"{list(parameter.shape)} that is not in the model: pass the model "
                        "that the optimizer was made for"
                    )
                theirs = optimizer.state.get(parameter)
                if theirs:
                    ours = {key: _part(one, parameter, key, fqn) for key, one in theirs.items()}
                    self.state[self._parts[fqn]] = ours
                    self._pairs.append((theirs, ours))
            self.param_groups.append({**group, "params": [self._parts[fqn] for fqn, _ in found]})

    @property
    def slots(self) -> set[str]:
        """Return the names of the optimizers' values for parameters."""
        return set(chain.from_iterable(self.state.values()))

    def without_elements(self) -> dict[str, Any]:
        """Return ``{name: {slot: [dtype, shape]}}`` of the tensors that have no elements."""
        shapes = {name: shard.shape for name, shard in self.shards.items()}
        return self.training.without_elements(shapes)

    def scalars(self) -> dict[str, Mapping[str, Any]]:
        """Return the optimizers' numbers by name, and by parameter.

        Each rank knows only its own parameters' numbers, so no rank's numbers hold for all.
        """
        self.training.entries()
        return {
            name: value
            if isinstance(value, Mapping)
            else {fqn: value for fqn, one in self._parts.items() if name in self.state.get(one, ())}
            for name, value in self.training.scalars().items()
        }

    def set_optimizer(self, scalars: Mapping[str, Any], without_state: Collection[str]) -> None:
        """Set the optimizers' numbers; drop the state of parameters that had none when saved."""
        parts: Any = self._parts
        set_scalars(parts, self, scalars)
        for theirs, ours in self._pairs:
            # Both dictionaries hold the same tensors, so only the numbers differ.
            theirs |= {key: one for key, one in ours.items() if not isinstance(one, Tensor)}
        # A 0-d parameter's moments are numbers.
        counted = chain.from_iterable(one for one in scalars.values() if isinstance(one, Mapping))
        for fqn in self.parameters.keys() & set(without_state) - set(counted):
            for optimizer in self.optimizers:
                optimizer.state.pop(self.parameters[fqn], None)

    def set_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters of the optimizers' groups, such as the learning rate.

        Raise ``StateError`` if parameters of one group were in several groups when saved.
        """
        owners = {fqn: group for group in saved for fqn in group.get("params", ())}
        groups = chain.from_iterable(one.param_groups for one in self.optimizers)
        for group, named in zip(groups, self.training.param_groups(), strict=True):
            found = [owners[fqn] for fqn in named["params"] if fqn in owners]
            if any(one is not found[0] for one in found):
                raise StateError(
                    f"{named['params'][0]} and others are in one group of the optimizer, but "
                    "were in several when they were saved: make the same groups"
                )
            for key, value in found[0].items() if found else ():
                # A scheduler that is made later needs the initial rate.
                if key != "params" and (key in group or key == "initial_lr"):
                    group[key] = _like(group.get(key), value)


def make_optimizer_state(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
    """Make optimizers create all their state, ready to be filled. This drops gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
        every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if not all(optimizer.state.get(one) for one in every if one.requires_grad):
            optimizer.state.clear()
            get_optimizer_state_dict(model, optimizer)


def _unwrapped(model: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the model without DDP, and the ranks that DDP keeps equal."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        return model, ()
    return inner.module, tuple(sorted(dist.get_process_group_ranks(inner.process_group)))


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise StateError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are "
                "flat: use fully_shard (FSDP2)"
            )
        if isinstance(module, DistributedDataParallel):
            raise StateError(
                f"{name} is wrapped in DistributedDataParallel: wrap the whole model instead"
            )


def _shard(
    fqn: str, value: Any, replicas: tuple[int, ...], places: _Places, *, is_alone: bool
) -> LocalShard:
    """Return this rank's part of a tensor of the model; ``replicas`` also hold a plain tensor."""
    if not isinstance(value, Tensor):
        raise StateError(
            f"{fqn} is a {type(value).__name__} that a module's get_extra_state returned, not "
            "a tensor: it cannot be saved",
            fqn=fqn,
        )
    shape, local = tuple(value.shape), value
    if isinstance(value, DTensor):
        local = value.to_local()
        place = value.device_mesh, value.placements, shape
        if place not in places:
            places[place] = _placed(fqn, value, shape, is_alone=is_alone)
        boxes, replicas = places[place]
    else:
        boxes = (Box.full(shape),)
    if type(local) not in (Tensor, nn.Parameter) or local.dtype not in DTYPES or local.is_meta:
        kind = "on the meta device" if local.is_meta else f"{type(local).__name__} of {local.dtype}"
        raise StateError(
            f"{fqn} is {kind}; only plain tensors of {', '.join(map(str, DTYPES))} can be saved",
            fqn=fqn,
        )
    if sum(box.num_elements for box in boxes) != local.numel():
        raise StateError(
            f"{fqn} of shape {list(shape)} is placed in an unknown way: {value.placements} "  # type: ignore[attr-defined]
            f"leaves {local.numel()} elements here",
            fqn=fqn,
        )
    parameter: Any = value
    return LocalShard(
        fqn=fqn,
        shape=shape,
        boxes=boxes,
        replicas=replicas,
        parameter=parameter,
        local=local.detach(),
    )


def _placed(
    fqn: str, value: DTensor, shape: tuple[int, ...], *, is_alone: bool
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """Return this rank's boxes of a tensor, and the ranks of its mesh with the same, in order."""
    if any(placement.is_partial() for placement in value.placements):
        raise StateError(f"{fqn} is a partial sum: redistribute it before you save", fqn=fqn)
    cuts = [] if is_whole(shape) else cuts_of(value)
    if is_alone and any(cut.num_parts > 1 for cut in cuts):
        raise StateError(f"{fqn} is sharded over several ranks: all of them must save", fqn=fqn)
    if is_alone:
        return boxes_of(shape, cuts), ()
    mesh: Any = value.device_mesh
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(value.placements, mesh.get_coordinate(), strict=True)
    )
    return boxes_of(shape, cuts), tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _part(value: Any, parameter: nn.Parameter, slot: str, fqn: str) -> Any:
    """Return this rank's part of an optimizer's value for a parameter."""
    if not isinstance(value, DTensor):
        return value
    if value.dim() and getattr(parameter, "placements", None) != value.placements:
        raise StateError(f"the optimizer's {slot} of {fqn} is not placed as the parameter", fqn=fqn)
    return value.to_local()


def _like(known: Any, value: Any) -> Any:
    """Return a value from JSON in the form of the known one."""
    if isinstance(known, Tensor):
        return known.fill_(value)
    return tuple(value) if isinstance(known, tuple) else value
