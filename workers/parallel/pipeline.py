"""Cut a model into pipeline stages, and pass micro-batches through them.

A script calls its stages as if they were the whole model. torch's schedules decide when a stage
computes which pass, and send activations and gradients between stages (1F1B: at most as many open
passes as stages; interleaved 1F1B if a rank has several stages: Narayanan et al., SC 2021).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from workers.collectives import is_of_script
from workers.errors import LayoutRefusedError, TaskError
from workers.parallel import hub
from workers.parallel.fsdp import own_names
from workers.parallel.mesh import Mesh
from workers.parallel.tensor import ModelPlan
from workers.parallel.torch_names import tree_map

_Schedule = PipelineScheduleSingle | PipelineScheduleMulti

# A lost peer is an error, and torch logs the whole schedule with every error in it.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
#: The number of micro-batches in a round of an evaluation, per rank of the pipeline.
_ROUND: Final = 2
#: Returns a context manager for the forward pass of a stage, given its number.
Around: TypeAlias = Callable[[int], AbstractContextManager[Any]]


class Stages:
    """The stages of a model on the meta device.

    The model is built once, not once per stage, and temporarily becomes each stage.

    Args:
        per_rank: The number of stages on each rank. Rank ``r`` has the stages ``r``, ``r +
            num_ranks``, and so on.

    Raises:
        TaskError: There is no plan, a parameter belongs to no stage or several, or stages share
            one.
    """

    def __init__(
        self, whole: nn.Module, plan: ModelPlan, num_ranks: int, per_rank: int = 1
    ) -> None:
        keep_stage = plan.keep_stage
        if keep_stage is None and hub.has_stages(whole):
            hub.refuse_stages(whole, num_ranks, per_rank)
            keep_stage = hub.keep_stage
        if keep_stage is None:
            raise LayoutRefusedError(
                f"parallel.pp={num_ranks}: model {type(whole).__name__} has no plan for it; give "
                "one, session.model(build, plan=everstep.ModelPlan(keep_stage=...)), or write "
                "parallel.pp: 1",
                axis="pp",
            )
        self._whole, self._keep_stage = whole, keep_stage
        self._num_ranks, self.num_stages = num_ranks, num_ranks * per_rank
        held: list[Collection[str]] = []
        for number in range(self.num_stages):
            with self._become(number):
                held.append(_places(whole).keys())
        _refuse_misfits(whole, held, num_ranks)

    def keep(self, model: nn.Module, number: int) -> None:
        """Remove from ``model``, a copy of the whole one, what stage ``number`` does not have."""
        self._keep_stage(model, number, self.num_stages)

    def of_rank(
        self, rank: int, build: Callable[[], nn.Module], around: Around = nullcontext
    ) -> StageModel:
        """Return the stages of a rank, cut out of models from ``build`` on the meta device."""
        held: dict[int, nn.Module] = {}
        for number in range(rank, self.num_stages, self._num_ranks):
            with torch.device("meta"):
                held[number] = build()
            self.keep(held[number], number)
        return StageModel(held, self.num_stages, around)

    def described(
        self, number: int, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> list[tuple[Tensor, ...]]:
        """Return the inputs of all stages up to ``number`` and the outputs of that one, on meta.

        ``args`` and ``kwargs`` are those of the whole model; every stage gets the latter. ``dtype``
        is that of FSDP2's computation; None for the dtype of the parameters.
        """

        def without_value(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            of_dtype = dtype if value.is_floating_point() else None
            return torch.empty_like(value, device="meta", dtype=of_dtype)

        found: list[tuple[Tensor, ...]] = [tree_map(without_value, tuple(args))]
        named = tree_map(without_value, kwargs)
        for each in range(number + 1):
            with self._become(each), torch.no_grad():
                try:
                    returned = self._whole.to(dtype)(*found[-1], **named)
                except (RuntimeError, TypeError) as error:
                    self._refuse_values(error)
                    raise
            found.append(returned if isinstance(returned, tuple) else (returned,))
        return found

    def _refuse_values(self, error: Exception) -> None:
        """Raise ``LayoutRefusedError`` if the model needed values of meta tensors."""
        if "meta" not in str(error).lower():
            return
        names = {id(module): name for name, module in self._whole.named_modules()}
        module, line = type(self._whole).__name__, ""
        for frame, _ in walk_tb(error.__traceback__):
            module = names.get(id(frame.f_locals.get("self"))) or module
            if is_of_script(frame):
                line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        raise LayoutRefusedError(
            f"parallel.pp={self._num_ranks}: {line} in {module} reads values of a tensor, and "
            "stages agree on shapes before there are values. Decide in the function of the "
            "loss and pass the answer to the model, model(x, skip=True); or compute both and "
            "choose by torch.where; or write parallel.pp: 1",
            axis="pp",
        ) from error

    @contextmanager
    def _become(self, number: int) -> Iterator[None]:
        """Turn the whole model into a stage, and undo the changes to its modules afterwards."""
        held = [
            (module, {name: copy.copy(value) for name, value in vars(module).items()})
            for module in self._whole.modules()
        ]
        try:
            self.keep(self._whole, number)
            yield
        finally:
            for module, attributes in held:
                vars(module).clear()
                vars(module).update(attributes)


class StageModel(nn.Module):
    """The stages of a rank, which a script calls as if they were the whole model.

    Only the last stage computes a loss. But the script's loss function runs for every stage. On the
    last one it gets the outputs of the whole model; on the others it ends where it calls the model.

    Attributes:
        stages: The rank's stages. ``own_names`` removes this level from the parameters' names.
        numbers: The numbers of the rank's stages, in ascending order.
        num_stages: The number of stages on all ranks.
    """

    def __init__(
        self, held: Mapping[int, nn.Module], num_stages: int, around: Around = nullcontext
    ) -> None:
        super().__init__()
        self._around = around
        self.stages = nn.ModuleDict({f"_stage_{number}": one for number, one in held.items()})
        self.numbers, self.num_stages = tuple(held), num_stages
        self._is_asked = False
        self._received: tuple[Tensor, ...] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the whole model, on the last stage."""
        if self._is_asked:
            raise CalledSignal(args, kwargs)
        received, self._received = self._received, None
        if received is None:
            raise LayoutRefusedError(
                "with parallel.pp above 1 call the model once in each call of the function "
                "that session.train_step or session.evaluate gets, and nowhere else",
                axis="pp",
            )
        with self._around(self.num_stages - 1):
            return self.stage(self.num_stages - 1)(*received, **kwargs)

    def stage(self, number: int) -> nn.Module:
        """Return a stage of this rank."""
        return self.stages[f"_stage_{number}"]

    def share_buffers(self) -> None:
        """Make a buffer that several stages have one tensor, which only the first of them saves."""
        held: dict[str, Tensor | None] = {}
        for stage in self.stages.values():
            for path, module in stage.named_modules():
                for key, buffer in list(module.named_buffers(recurse=False)):
                    first = held.setdefault(f"{path}.{key}", buffer)
                    if first is not buffer:
                        module.register_buffer(key, first, persistent=False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as the ``config`` of a ``transformers`` one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            stages: Any = super().__getattr__("stages")
            return getattr(next(stages.children()), name)

    def called_with(self, loss_of: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which ``loss_of`` calls the model; else raise ``TaskError``."""
        self._is_asked = True
        try:
            loss_of()
        except CalledSignal as called:
            return called.args, called.kwargs
        finally:
            self._is_asked = False
        raise TaskError("session.train_step: the function returned without calling the model")

    def compute(self, number: int, loss_of: Callable[[], Any], received: tuple[Tensor, ...]) -> Any:
        """Return a stage's output for a micro-batch; for the last stage, the loss.

        ``loss_of`` is the script's function of the loss. ``received`` are the outputs of the stage
        before; they are empty on the first stage.
        """
        if number == self.num_stages - 1:
            self._received = received
            returned = loss_of()
            if self._is_waiting():
                raise TaskError("session.train_step: the function did not call the model")
            return returned
        args, kwargs = self.called_with(loss_of)
        with self._around(number):
            return self.stage(number)(*(received if number else args), **kwargs)

    def _is_waiting(self) -> bool:
        return self._received is not None


class CalledSignal(BaseException):
    """The script called a module. It is no Exception, so the script's handlers do not catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("a module was called")
        self.args, self.kwargs = args, kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHooks:
    """Callbacks around each pass. Two integers are the numbers of the stage and the micro-batch."""

    begin: Callable[[int, int], None]  #: Called before a forward pass.
    #: Called on the last stage with the number of the micro-batch and the result of the script's
    #: function; returns the loss to differentiate.
    weigh: Callable[[int, Any], Tensor]
    end_forward: Callable[[], None] = lambda: None  #: Called after a forward pass.
    #: Called on every stage but the last, with the number of the micro-batch and the outputs, after
    #: the forward pass.
    computed: Callable[[int, tuple[Tensor, ...]], None] = lambda _number, _outputs: None
    #: Called before a backward pass.
    begin_backward: Callable[[int, int], None] = lambda _stage, _number: None
    end: Callable[[int, int], None] = lambda _stage, _number: None  #: Called after it.


class Pipeline:
    """Runs passes through the stages. Every rank has one and makes the same calls at the same time.

    ``dtype`` is that of activations; None for the dtype of the parameters.
    """

    def __init__(
        self,
        model: StageModel,
        stages: Stages,
        *,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.model, self._stages, self._dtype = model, stages, dtype
        self._mesh, self._device = mesh, device
        self._training: _Schedule | None = None
        self.batches: Sequence[Any] = ()
        self.loss_of: Callable[[Any], Any] = lambda _batch: None
        self.hooks: PassHooks
        #: The number of the schedule's first micro-batch.
        self.first = 0
        #: The error of a pass.
        self.error: BaseException | None = None

    def train(
        self, batches: Sequence[Any], loss_of: Callable[[Any], Any], hooks: PassHooks
    ) -> None:
        """Run a forward and a backward pass of every micro-batch and accumulate gradients.

        Raise ``TaskError`` if there are fewer micro-batches than pipeline ranks, or their shapes
        differ.
        """
        num_ranks = self._mesh.layout.pp
        if len(batches) < num_ranks:
            raise TaskError(
                f"parallel.pp={num_ranks} needs at least as many micro-batches on each "
                f"data-parallel rank, and there are {len(batches)}; raise train.global_batch "
                "or lower train.micro_batch"
            )
        if self._training is None:
            self._training = self._schedule(Schedule1F1B, ScheduleInterleaved1F1B, batches, loss_of)
        with self._running(batches, loss_of, hooks):
            self._training.step(target=torch.arange(len(batches)), return_outputs=False)

    def evaluate(
        self, batches: Sequence[Any], loss_of: Callable[[Any], Any], hooks: PassHooks
    ) -> None:
        """Run a forward pass of every micro-batch.

        They run in rounds, because a schedule keeps what its micro-batches send until it ends.
        """
        in_round = _ROUND * self._mesh.layout.pp
        schedules: dict[int, _Schedule] = {}
        for first in range(0, len(batches), in_round):
            part = batches[first : first + in_round]
            if len(part) not in schedules:
                kinds = ScheduleGPipe, ScheduleLoopedBFS
                schedules[len(part)] = self._schedule(*kinds, part, loss_of)
            with torch.no_grad(), self._running(batches, loss_of, hooks, first):
                schedules[len(part)].eval(target=torch.arange(len(part)), return_outputs=False)

    @contextmanager
    def _running(
        self,
        batches: Sequence[Any],
        loss_of: Callable[[Any], Any],
        hooks: PassHooks,
        first: int = 0,
    ) -> Iterator[None]:
        """Compute micro-batches from ``first`` on, and raise an error of a pass unchanged."""
        self.batches, self.loss_of, self.hooks, self.first = batches, loss_of, hooks, first
        try:
            yield
        except RuntimeError:
            # torch raises its own error, with the inputs of the pass.
            if self.error is not None:
                raise self.error from None
            raise
        finally:
            self.batches, self.error = (), None

    def _schedule(
        self,
        of_one: type[Schedule1F1B | ScheduleGPipe],
        of_several: type[ScheduleInterleaved1F1B | ScheduleLoopedBFS],
        batches: Sequence[Any],
        loss_of: Callable[[Any], Any],
    ) -> _Schedule:
        """Return a schedule for micro-batches of this number and shape.

        Its class is ``of_one`` if a rank has one stage, else ``of_several``.
        """
        model = self.model
        args, kwargs = model.called_with(lambda: loss_of(batches[0]))
        described = self._stages.described(model.numbers[-1], args, kwargs, self._dtype)
        stages = [self._stage(number, *described[number : number + 2]) for number in model.numbers]
        given: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if len(stages) == 1:
            return of_one(stages[0], len(batches), **given)
        return of_several(list(stages), len(batches), **given)

    def _stage(
        self, number: int, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> _Stage:
        num_stages = self.model.num_stages
        loss = (torch.empty((), device="meta"),)
        # If the shapes are given, torch runs no pass to find them.
        return _Stage(
            _Passes(self, number, outputs),
            number,
            num_stages,
            self._device,
            input_args=_differentiable(inputs) if number else (),
            output_args=_differentiable(loss if number == num_stages - 1 else outputs),
            group=self._mesh.stages,
        )


class _Stage(PipelineStage):
    """torch's stage, which notes the number of each pass and receives into memory of that pass.

    torch's own stage has a buffer for everything that any micro-batch receives, forward and
    backward, as long as the schedule lives. Here buffers are on the meta device except for open
    passes.
    """

    submod: _Passes

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        self.device, device = torch.device("meta"), self.device
        try:
            yield
        finally:
            self.device = device

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> Any:
        self._put_buffers(recv_infos, self.device)
        return super()._get_recv_ops(recv_infos)

    @staticmethod
    def _put_buffers(recv_infos: Sequence[Any], device: torch.device | str) -> None:
        for info in recv_infos:
            buffer: Tensor | None = getattr(info, "buffer", None)
            if buffer is not None:
                info.buffer = torch.empty_like(buffer, device=device).requires_grad_(
                    buffer.requires_grad and buffer.is_leaf
                )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        self.submod.number = fwd_chunk_id
        found = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.has_backward:
            self._put_buffers(self.args_recv_info[fwd_chunk_id], "meta")
        return found

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002
        last_backward: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        if self.has_backward:
            self.submod.pipeline.hooks.begin_backward(self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            for infos in (self.args_recv_info, self.grad_recv_info):
                self._put_buffers(infos.get(bwd_chunk_id, ()), "meta")
            self.submod.pipeline.hooks.end(self.stage_index, bwd_chunk_id)


class _Passes(nn.Module):
    """The module that torch's stage calls for a forward pass.

    The sharded model is not its child: otherwise torch would decide when FSDP2 reduces gradients,
    but the step does that.
    """

    number: int

    def __init__(self, pipeline: Pipeline, stage: int, outputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.pipeline, self._stage = pipeline, stage
        self._is_last = stage == pipeline.model.num_stages - 1
        self._shapes = [tuple(output.shape) for output in outputs]

    def forward(self, *received: Tensor) -> Any:
        """Return the outputs for the next stage; on the last stage, the weighted loss."""
        try:
            return self._forward(received)
        except BaseException as error:
            self.pipeline.error = error
            raise

    def _forward(self, received: tuple[Tensor, ...]) -> Any:
        run = self.pipeline
        number, hooks = run.first + self.number, run.hooks
        hooks.begin(self._stage, number)
        returned = run.model.compute(
            self._stage, lambda: run.loss_of(run.batches[number]), received
        )
        if self._is_last:
            returned = hooks.weigh(number, returned)
        hooks.end_forward()
        if self._is_last:
            # torch 2.11 refuses a loss whose dtype differs from the declared one. Its gradient is 1
            # in every dtype.
            return returned.float()
        outputs = returned if isinstance(returned, tuple) else (returned,)
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != self._shapes:
            raise LayoutRefusedError(
                "with parallel.pp above 1 all micro-batches have one shape: a stage returned "
                f"{shapes}, and {self._shapes} for the first; pad them to one length",
                axis="pp",
            )
        hooks.computed(number, outputs)
        return returned


def _differentiable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.requires_grad_(one.is_floating_point()) for one in tensors)


def _refuse_misfits(whole: nn.Module, held: Sequence[Collection[str]], num_ranks: int) -> None:
    """Raise ``TaskError`` unless each parameter is on one stage; ``held`` has their names."""
    kind = type(whole).__name__
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in _places(whole).items():
        by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        on = [number for number, each in enumerate(held) if any(name in each for name in names)]
        if len(names) > 1 and len(on) > 1:
            raise LayoutRefusedError(
                f"parallel.pp={num_ranks}: {' and '.join(names)} of model {kind} are one "
                f"parameter on stages {', '.join(map(str, on))}; untie them (model.tied: false, "
                "or tie_word_embeddings=False of transformers), or write parallel.pp: 1",
                axis="pp",
            )
        if len(on) != 1:
            where = f"on stages {', '.join(map(str, on))}" if on else "on no stage"
            raise LayoutRefusedError(
                f"parallel.pp={num_ranks}: the plan leaves {names[0]} of model {kind} {where}; "
                "each parameter must be on one: write another keep_stage, or parallel.pp: 1",
                axis="pp",
            )


def _places(model: nn.Module) -> dict[str, nn.Parameter]:
    return own_names(model.named_parameters(remove_duplicate=False))
