"""Make every rank gather and reduce the same parameters in the same order, whatever it runs.

A rank may skip modules that other ranks run: experts, a modality's encoder, a layer under
stochastic depth. FSDP2 assumes that all ranks use the same parameters in a pass: its reduce-scatter
covers those with a gradient, and a unit that did not run has no collectives (torch 2.13,
pytorch#158719).

Here units follow the order in which the model registers them. Before a rank runs a unit, it joins
the earlier ones that it skipped: it gathers them, and in the backward pass it reduces zeros while
other ranks reduce gradients. No rank needs to know what others skip, and a rank that skips nothing
does exactly what FSDP2 does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workers.errors import TaskError
from workers.parallel.fsdp import LocalShard, fsdp_modules, is_whole, take_frozen
from workers.parallel.torch_names import Group, NoGroup, in_backward, param_group


class Used:
    """The parameters of the whole model that a micro-batch of the step used on this rank.

    ``shapes`` are those of all parameters of the whole model, by name.
    """

    def __init__(self, shards: Sequence[LocalShard], shapes: Mapping[str, tuple[int, ...]]) -> None:
        numbers = {name: number for number, name in enumerate(sorted(shapes))}
        self._shards = {numbers[shard.fqn]: shard for shard in shards}
        self.places = {id(shard.parameter): numbers[shard.fqn] for shard in shards}
        # FSDP2 leaves some parameters whole; they always count as used.
        self._unmarked = bytearray(len(numbers))
        for number, shard in self._shards.items():
            self._unmarked[number] = is_whole(shard.shape)
        self.marks = bytearray(self._unmarked)
        #: Numbers of the parameters that all ranks agreed are frozen. Some may have changed since
        #: then.
        self.frozen: frozenset[int] = frozenset()

    def numbers(self) -> Tensor:
        """Return 1 for each used parameter, else 0, as float64; callers sum it over the ranks."""
        return torch.frombuffer(self.marks, dtype=torch.uint8).double()

    def drop_unused(self, sums: Sequence[float]) -> bool:
        """Drop the zeros of parameters that no rank used; return whether a gradient is left."""
        self.marks[:] = self._unmarked
        if 0.0 not in sums:
            return True
        for number, shard in self._shards.items():
            if not sums[number]:
                shard.parameter.grad = None
        return any(shard.parameter.grad is not None for shard in self._shards.values())


@dataclass(slots=True)
class _Use:
    """This rank's use of a unit in one pass."""

    calls: int = 0  #: Its forward passes with gradients; none if the rank only joins it.
    ends: int = 0  #: Number of these that autograd has finished in the backward pass.
    is_late: bool = False  #: No input needs a gradient, so autograd does not report its end.
    has_begun: bool = False
    has_ended: bool = False
    #: Number of units inside it that the backward pass has yet to reach.
    num_open: int | None = None


class Units:
    """The FSDP units of one model, or of several in a ``ModuleDict``, that a script calls.

    ``used`` records the parameters that have a gradient.
    """

    def __init__(self, model: nn.Module, used: Used) -> None:
        self.modules = [*fsdp_modules(model)]  #: The modules that FSDP2 gathers.
        self.used = used
        self.uses: dict[_Inside, _Use] = {}
        #: Units that were reduced before the backward pass had reported all their gradients.
        self.early: list[_Unit] = []
        self._groups: set[Group] = set()
        self._by_pass: dict[int, dict[_Inside, _Use]] = {}
        self._top = _Inside(self)
        _add(model, self._top, self, set())

    def add(self, group: Group) -> None:
        """Add the parameters of a unit, which FSDP2 gathers together."""
        self._groups.add(group)

    def begin_step(self) -> None:
        """Apply what the script froze while parameters were gathered."""
        for group in self._groups:
            take_frozen(group)

    def begin_forward(self, number: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self.uses = self._by_pass[number] = {}
        self._top.open()

    def begin_backward(self, number: int) -> None:
        """Begin the backward pass of a micro-batch; other forward passes may come in between."""
        self._top.join_rest()
        self.uses = self._by_pass.pop(number)

    def end_backward(self) -> None:
        """Reduce the units that the backward pass did not reach."""
        for root in reversed(self._top.children):
            if not root.use.has_ended:
                root.finish()


def _add(module: nn.Module, parent: _Inside, units: Units, seen: set[Any]) -> None:
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, FSDPModule):
        group = param_group(module)
        if group is not None and group not in seen:
            seen.add(group)
            parent = _Unit(units, parent, group, module)
            units.add(group)
        elif group is None and not isinstance(parent, _Unit):
            parent = root = _Unit(units, parent, NoGroup(), module)
            root.watch()
    for child in module.children():
        _add(child, parent, units, seen)


class _Inside:
    """The units directly inside another one, or inside the model."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.children: list[_Unit] = []
        #: The first unit that was neither run nor joined so far in this forward pass.
        self._next = 0

    @property
    def use(self) -> _Use:
        """Return how this rank uses a unit in the current pass."""
        uses = self._units.uses
        return uses.get(self) or uses.setdefault(self, _Use())

    def open(self) -> None:
        """Begin a forward pass."""
        self._next = 0
        for one in self.children:
            one.is_open = False

    def join_before(self, number: int) -> None:
        """Gather the units that the rank skipped before the one with this number."""
        if number >= self._next:
            for one in self.children[self._next : number]:
                one.join_forward()
            self._next = number + 1

    def join_rest(self) -> None:
        """Gather the units that the rank skipped at the end."""
        self.join_before(len(self.children))

    def settle_after(self, number: int, *, is_final: bool = False) -> None:
        """Reduce the units after the one with this number, in reverse order."""
        use = self.use
        num_open = len(self.children) if use.num_open is None or is_final else use.num_open
        for one in reversed(self.children[number + 1 : num_open]):
            one.settle(is_final=is_final)
        use.num_open = min(num_open, number + 1)


class _Unit(_Inside):
    """A unit of FSDP2. torch reaches its parameter group through this object.

    Attributes:
        is_open: Whether it is in its forward pass.
    """

    def __init__(
        self, units: Units, parent: _Inside, group: Group | NoGroup, module: FSDPModule
    ) -> None:
        super().__init__(units)
        self._parent, self._number = parent, len(parent.children)
        parent.children.append(self)
        self._root: _Unit = parent._root if isinstance(parent, _Unit) else self  # noqa: SLF001
        self._group, self._state = group, module._get_fsdp_state()  # noqa: SLF001
        self.is_open = False
        self._pre_forward: Any = group.pre_forward
        self._post_forward: Any = group.post_forward
        self._pre_backward, self._post_backward = group.pre_backward, group.post_backward
        self._begin_root: Any = self._state._root_pre_forward  # noqa: SLF001
        self._finish: Any = self._state._root_post_backward_final_callback  # noqa: SLF001
        wrapped: Any = group
        wrapped.pre_forward, wrapped.post_forward = self.begin_forward, self.end_forward
        wrapped.pre_backward, wrapped.post_backward = self.begin_backward, self.end_backward
        state: Any = self._state
        state._root_post_backward_final_callback = self._root.finish  # noqa: SLF001
        infos = [one._module_info for one in group.fsdp_params]  # noqa: SLF001
        held = [getattr(info.module, info.param_name) for info in infos]
        self._places = [units.used.places[id(one)] for one in held]

    def watch(self) -> None:
        """Record the forward passes of a root without parameters of its own."""
        state: Any = self._state
        end = state._register_pre_backward_hook  # noqa: SLF001

        def begun(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.begin_forward(module, *self._begin_root(module, args, kwargs))

        def ended(output: Any) -> Any:
            return end(self.end_forward(None, None, output))

        state._root_pre_forward, state._register_pre_backward_hook = begun, ended  # noqa: SLF001

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Join the units that the rank skipped before this one, and gather this one."""
        if self.is_open or in_backward():
            return self._pre_forward(module, args, kwargs)
        self._parent.join_before(self._number)
        self.open()
        self.is_open = True
        begun = self._pre_forward(module, args, kwargs)
        if torch.is_grad_enabled():
            use = self.use
            use.calls += 1
            # torch wraps inputs that need a gradient, so that it notices when they have it.
            use.is_late |= begun[0] is args and begun[1] is kwargs
        return begun

    def end_forward(self, module: nn.Module | None, given: Any, output: Any) -> Any:
        """Join the units that the rank skipped inside, and drop the gathered parameters."""
        if not in_backward():
            self.join_rest()
            self.is_open = False
        return self._post_forward(module, given, output)

    def join_forward(self) -> None:
        """Gather and drop the unit, as ranks that run it do."""
        state: Any = self._state
        if self._root is self:
            self._begin_root(None, (), {})
        self._pre_forward(None, (), {})
        self.open()
        self.join_rest()
        self._post_forward(None, None, None)
        if self._root is self:
            state._state_ctx.iter_forward_root = None  # noqa: SLF001

    def begin_backward(self, *how: Any) -> None:
        """Reduce the units that the rank skipped after this one, and gather this one."""
        use = self.use
        if not use.has_begun:
            use.has_begun = True
            self._parent.settle_after(self._number)
        self._pre_backward(*how)

    def end_backward(self, *_unused: Any) -> None:
        """Reduce the unit at the end of its last call's backward pass."""
        use, group = self.use, self._group
        use.ends += 1
        if use.has_ended:
            self._post_backward()
        elif use.ends >= use.calls:
            self._end(is_final=False)
        else:
            reduces, group.reduce_grads = group.reduce_grads, False
            self._post_backward()
            group.reduce_grads = reduces

    def settle(self, *, is_final: bool) -> bool:
        """Reduce the unit if the rank skipped it, or if torch does not notice that it is complete.

        Return whether the unit is a skipped root, whose backward pass this call has finished.
        """
        use = self.use
        if use.has_ended:
            if is_final:
                self.settle_after(-1, is_final=True)
            return False
        is_skipped = not (use.calls or use.has_begun)
        if is_skipped or (is_final and not use.has_begun and self._trains()):
            # Other ranks gather it for their backward pass.
            use.has_begun = True
            self._pre_backward(True)
        elif not is_final and not (use.is_late and use.has_begun):
            return False
        elif not is_final and self._group.reduce_grads:
            self._units.early.append(self)
        self._end(is_final=is_final or is_skipped)
        if is_skipped and self._root is self:
            self._finish()
        return is_skipped and self._root is self

    def finish(self) -> None:
        """Reduce the rest of a root's units at the end of a backward pass."""
        if not self.settle(is_final=True):
            self._finish()
        for unit in self._units.early:
            unit.refuse_more()
        self._units.early = []

    def refuse_more(self) -> None:
        """Raise ``TaskError`` if a gradient came too late to be reduced."""
        for one in self._group.fsdp_params:
            if one.unsharded_param.grad is not None:
                name = one._param_fqn  # noqa: SLF001
                raise TaskError(
                    f"{name} got a gradient after the backward pass of its module: the module "
                    "has no input that needs a gradient, and runs after one that is "
                    "registered later. Register modules in the order in which they run",
                    fqn=name,
                )

    def _trains(self) -> bool:
        frozen = self._units.used.frozen
        return any(place not in frozen for place in self._places)

    def _end(self, *, is_final: bool) -> None:
        self.settle_after(-1, is_final=is_final)
        if self._group.reduce_grads:
            self._fill()
        self._post_backward()
        self.use.has_ended = True

    def _fill(self) -> None:
        """Record which parameters have a gradient; give the others zeros of the same dtype."""
        marks = self._units.used.marks
        lacking: list[Any] = []
        dtypes: set[torch.dtype] = set()
        for one, place in zip(self._group.fsdp_params, self._places, strict=True):
            one.accumulate_unsharded_grad_if_needed()
            gradient = one.unsharded_accumulated_grad
            if gradient is None:
                gradient = one.unsharded_param.grad
            if gradient is not None:
                marks[place] = 1
                dtypes.add(gradient.dtype)
            elif one.sharded_param.requires_grad or place not in self._units.used.frozen:
                # This includes one that only this rank has just frozen: other ranks have a gradient
                # for it.
                lacking.append(one)
        if len(dtypes) > 1:
            # Gradients of earlier passes are summed in the dtype of the reduction.
            for one in self._group.fsdp_params:
                one.to_accumulated_grad_if_needed()
        for one in lacking:
            dtype = one.reduce_dtype if len(dtypes) > 1 else next(iter(dtypes), None)
            one.unsharded_accumulated_grad = torch.zeros_like(one.unsharded_param, dtype=dtype)
