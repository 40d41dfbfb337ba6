"""Shard a model over the mesh with FSDP2, starting on the meta device.

``shard_model`` wraps the model, ``materialize`` allocates memory, and the caller fills the local
shards. No rank communicates before the first forward pass.
"""

import itertools
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ucp_core.geometry import Box
from workers.errors import TaskError
from workers.parallel.mesh import Mesh
from workers.parallel.placements import boxes_of, replicas_over
from workers.parallel.torch_names import Group, param_group

log = logging.getLogger(__name__)

#: Models with at most this many bytes of float32 parameters are one FSDP unit.
SMALL_BYTES_MAX: Final = 64 << 20
#: Each module in an outermost container of these types becomes an FSDP unit.
_BLOCK_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
#: The names under which wrappers (torch 2.13, peft 0.21) and pipeline stages keep a module.
WRAPPERS: Final = re.compile(
    r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|base_layer)\."
    r"|^(_stage_\d+\.)?base_model\.model\.|^_stage_\d+\."
)

_VIEW_WARNING: Final = "FSDP2-wrapped module .* returned a view tensor"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's shard of one parameter."""

    fqn: str  #: Name of the parameter in the model; see ``own_names``.
    shape: tuple[int, ...]
    #: This rank's elements, in the order of ``local``. There are several boxes if the rank has a
    #: slice of each part of a fused weight. Otherwise there is one, which may be empty.
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]  #: All ranks with the same elements, this one included, in order.
    parameter: nn.Parameter  #: The parameter in the model; it receives the gradient.
    local: Tensor  #: This rank's elements, in the memory that the model uses.

    def pieces(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """Return each box with a view of its elements in ``tensor``, a tensor like ``local``."""
        if len(self.boxes) == 1:
            return [(self.boxes[0], tensor)]
        found: list[tuple[Box, Tensor]] = []
        starts = [self._starts(dim) for dim in range(len(self.shape))]
        for box in self.boxes:
            places = zip(starts, box.start, box.shape, strict=True)
            lows = [(begins[start], extent) for begins, start, extent in places]
            found.append((box, tensor[tuple(slice(low, low + size) for low, size in lows)]))
        return found

    def _starts(self, dim: int) -> dict[int, int]:
        """Map the start of each run of indices along a dim to its index in ``local``."""
        runs = sorted({(box.start[dim], box.stop[dim]) for box in self.boxes})
        lengths = [stop - start for start, stop in runs]
        places = itertools.accumulate(lengths, initial=0)
        return {start: place for (start, _), place in zip(runs, places, strict=False)}

    @property
    def gradient(self) -> Tensor | None:
        """Return the local gradient, shaped like ``local``; None before the first backward."""
        gradient: Any = self.parameter.grad
        if gradient is None or is_whole(self.shape):
            return gradient  # type: ignore[no-any-return]
        # This saves 20 us per parameter and step, because ``to_local`` calls autograd.
        return gradient._local_tensor  # type: ignore[no-any-return]  # noqa: SLF001


def is_whole(shape: tuple[int, ...]) -> bool:
    """Return whether FSDP2 leaves a parameter whole, because it has no dims or no elements."""
    return not shape or 0 in shape


def shard_model(
    model: nn.Module, mesh: Mesh, *, precision: str, reshard_after_forward: bool
) -> bool:
    """Shard ``model``, on the meta device, over the mesh. Every rank calls it with the same model.

    A small model is one unit and stays gathered: many small collectives would cost more than few
    large ones, and dropping the gathered copy would save little memory.

    Return whether the model stays gathered until the last backward pass of a step. Raise
    ``TaskError`` if two models share a parameter.

    Args:
        model: Each module in its outermost containers becomes a unit. An ``nn.ModuleDict`` at the
            top computes nothing: its modules are separate models. If a script has made its own
            units, the rest becomes one. Experts that live only on some ranks are units of their
            own, gathered and reduced by the ranks with the same experts.
        precision: "fp32", or "bf16" to compute in bfloat16; parameters and gradient sums stay
            float32.
        reshard_after_forward: Whether to drop a unit's gathered parameters after its forward pass.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    size_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    is_small = size_bytes <= SMALL_BYTES_MAX
    whole = {one for one in model.parameters() if is_whole(tuple(one.shape))}
    has_own = any(True for _ in fsdp_modules(model))
    for experts in _experts(model, mesh):
        assert mesh.experts is not None, "a mesh cuts them"
        fully_shard(
            experts,
            mesh=mesh.experts.sharding,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward and not is_small,
        )
    roots = _roots(model)
    if len(roots) == 1:
        # FSDP2 warns about `out += x` outside of a unit. With one model this raises an error in
        # the backward pass of the unit or in the step; with several, one could get no gradients.
        warnings.filterwarnings("ignore", _VIEW_WARNING)
    for root in roots:
        for block in () if is_small or has_own else _blocks(root):
            fully_shard(
                block,
                mesh=mesh.sharding,
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
                ignored_params=whole,
            )
        if isinstance(root, FSDPModule):
            continue
        # The root's own parameters stay gathered, because the backward pass starts with them.
        fully_shard(
            root,
            mesh=mesh.sharding,
            mp_policy=policy,
            reshard_after_forward=False,
            ignored_params=whole,
        )
    for module in fsdp_modules(model):
        # Libraries look up a model by its class's name, which FSDP2 changes.
        kind, (_, theirs) = type(module), type(module).__bases__
        kind.__name__, kind.__qualname__ = theirs.__name__, theirs.__qualname__
        # Gradients are sums over tokens; the training step divides by the number of tokens. If a
        # rank is alone, torch would copy them once more to divide by 1.
        if mesh.sharding.size() > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return not has_own and (is_small or not reshard_after_forward)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a sharded model; shared parameters stay shared.

    Parameters and buffers are uninitialised; ``workers.train.session`` fills them.
    """
    with keeping_shared(model):
        # This is like ``to_empty``, which would plan a sharding for the shape of each DTensor.
        model._apply(partial(_empty_like, device=device))  # noqa: SLF001


def _empty_like(tensor: Tensor, *, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return DTensor.from_local(
        torch.empty_like(tensor.to_local(), device=device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@contextmanager
def keeping_shared(model: nn.Module) -> Iterator[None]:
    """Make modules that shared a parameter share the new one.

    ``_apply`` and ``parallelize_module`` create one for every module that has it (torch 2.13).
    """
    shared = _shared(model)
    yield
    for owners in shared:
        first = getattr(*owners[0])
        for module, name in owners[1:]:
            setattr(module, name, first)


def local_shards(model: nn.Module, mesh: Mesh) -> list[LocalShard]:
    """Return this rank's shard of every parameter, sorted by name; shared parameters occur once.

    Raise ``TaskError`` if a trained parameter is not float32.
    """
    found: list[LocalShard] = []
    for fqn, parameter in sorted(own_names(model.named_parameters()).items()):
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise TaskError(
                f"parameter {fqn} is {parameter.dtype}; masters are float32: build the model in "
                "float32, and set train.precision=bf16 to compute in bfloat16; or freeze it",
                fqn=fqn,
            )
        sharded: Any = parameter
        shape = tuple(parameter.shape)
        cuts = [] if is_whole(shape) else mesh.cuts_of(sharded)
        found.append(
            LocalShard(
                fqn=fqn,
                shape=shape,
                boxes=boxes_of(shape, cuts),
                replicas=replicas_over(mesh.layout, mesh.rank, cuts),
                parameter=parameter,
                local=(parameter if is_whole(shape) else sharded.to_local()).detach(),
            )
        )
    return found


def own_names(named: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    """Return values by the names that the model's own modules give them, without wrappers.

    ``torch.compile`` and activation checkpointing wrap a module in another one. A model that is
    resumed with or without these has the same parameters. The same holds for ``peft``: the base
    model of an adapter keeps its names.

    Raise ``TaskError`` if two values would have the same name.
    """
    found: dict[str, _T] = {}
    for name, value in named:
        own = WRAPPERS.sub("", name)
        if own in found:
            raise TaskError(
                f"{name} and another one would both be called {own}; rename a module", fqn=own
            )
        found[own] = value
    return found


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP units; each is gathered and reduced as one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def num_foreign(model: nn.Module) -> int:
    """Return how many elements of trained parameters this rank gathers from other ranks."""
    groups = [param_group(module) for module in fsdp_modules(model)]
    trained = [
        one
        for group in groups
        if group is not None
        for one in group.fsdp_params
        if one.sharded_param.requires_grad
    ]
    return sum(one._orig_size.numel() - one.sharded_size.numel() for one in trained)  # noqa: SLF001


def drop_gathered(model: nn.Module) -> None:
    """Make the next pass gather the parameters again, because their values changed.

    Few units are still gathered at that point: those of a model that the script called without a
    backward pass. Without this, the next pass would use their old values.
    """
    for module in fsdp_modules(model):
        take_frozen(param_group(module))
        module.reshard()


def take_frozen(group: Group | None) -> None:
    """Keep what a script froze or unfroze while parameters were gathered.

    FSDP2 would forget it when it gathers them again.
    """
    for one in group.fsdp_params if group is not None and group.is_unsharded else ():
        one.sharded_param.requires_grad_(one.unsharded_param.requires_grad)


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return the models in ``model`` that a script calls separately."""
    if type(model) is not nn.ModuleDict:
        return [model]
    inside = {name: set(root.modules()) for name, root in model.items()}
    for places in _shared(model):
        names = [name for name, modules in inside.items() if any(m in modules for m, _ in places)]
        if len(names) > 1:
            raise TaskError(
                f"models {' and '.join(names)} share the parameter {places[0][1]}; put them into "
                "one module that calls both",
                models=names,
            )
    return list(model.values())


def _experts(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Return exactly the modules with parameters that expert parallelism has cut."""
    ranks = mesh.experts.ranks if mesh.experts is not None else None
    return [
        module
        for module in model.modules()
        if any(
            isinstance(one, DTensor) and one.device_mesh == ranks
            for one in module.parameters(recurse=False)
        )
    ]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that each become a unit: those in the model's outermost containers.

    A Hugging Face model names the classes of its layers, which take precedence. If there are
    neither these nor a container, the containers inside its modules count. A module that shares a
    parameter with another one stays in the root's unit.
    """
    shared = [{module for module, _ in places} for places in _shared(model)]
    found = _whole_blocks(model) or list(_contents(model))
    found = found or list(_contents(model, goes_deeper=True))
    blocks = []
    for block in found:
        inside = set(block.modules())
        if all(owners <= inside or not owners & inside for owners in shared):
            blocks.append(block)
    if not blocks:
        log.warning(
            "model %s keeps no layers in an nn.ModuleList, nn.ModuleDict or nn.Sequential: every "
            "worker gathers all its parameters at once",
            type(model).__name__,
        )
    return blocks


def _whole_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of the classes in ``_no_split_modules`` of ``transformers``."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _contents(module: nn.Module, *, goes_deeper: bool = False) -> Iterator[nn.Module]:
    """Yield the modules with parameters in the outermost containers of ``module``."""
    for child in module.children():
        if isinstance(child, _BLOCK_CONTAINERS):
            for block in child.children():
                if isinstance(block, nn.ModuleList | nn.ModuleDict):
                    # A container computes nothing itself, so it cannot be a unit.
                    yield from _contents(nn.ModuleList([block]))
                elif any(True for _ in block.parameters()):
                    yield block
        elif goes_deeper:
            yield from _contents(child, goes_deeper=True)


def _shared(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return [places for places in owners.values() if len(places) > 1]
