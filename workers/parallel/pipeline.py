"""Pipeline parallelism: the stages of a model, and the passes of micro-batches through them.

A script calls its stage as if it were the whole model. torch's schedules decide when a stage
computes which pass, and send activations and gradients between stages (1F1B: at most as many
passes are open as there are stages).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from workers.errors import LayoutRefusedError, TaskError
from workers.parallel import hub
from workers.parallel.fsdp import own_names
from workers.parallel.mesh import Mesh
from workers.parallel.tensor import ModelPlan
from workers.parallel.torch_names import tree_map


class Stages:
    """The stages of a model on the meta device: it becomes one of them for a while.

    So it is built once, and not once for each.

    Raises:
        TaskError: There is no plan, a parameter is in no stage or in several, or stages share one.
    """

    def __init__(self, whole: nn.Module, plan: ModelPlan, num_stages: int) -> None:
        keep_stage = plan.keep_stage
        if keep_stage is None and hub.has_stages(whole):
            keep_stage = hub.keep_stage
        if keep_stage is None:
            raise LayoutRefusedError(
                f"parallel.pp={num_stages}: model {type(whole).__name__} has no plan for it; give "
                "one, session.model(build, plan=everstep.ModelPlan(keep_stage=...)), or write "
                "parallel.pp: 1",
                axis="pp",
            )
        self._whole, self._keep_stage, self._num_stages = whole, keep_stage, num_stages
        held: list[Collection[str]] = []
        for number in range(num_stages):
            with self._become(number):
                held.append(_places(whole).keys())
        _refuse_misfits(whole, held)

    def keep(self, model: nn.Module, number: int) -> None:
        """Remove from ``model``, which is like the whole one, what stage ``number`` lacks."""
        self._keep_stage(model, number, self._num_stages)

    def described(
        self, number: int, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> list[tuple[Tensor, ...]]:
        """Return what goes into each stage up to ``number``, and out of that, without values.

        Args:
            args: What the whole model is called with.
            kwargs: Likewise, by name; every stage gets them.
            dtype: The dtype that FSDP2 computes in; None for that of the parameters.
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
                returned = self._whole.to(dtype)(*found[-1], **named)
            found.append(returned if isinstance(returned, tuple) else (returned,))
        return found

    @contextmanager
    def _become(self, number: int) -> Iterator[None]:
        """Have the whole model be a stage; what that changes in its modules is taken back."""
        held = [
            (module, {name: _copied(value) for name, value in vars(module).items()})
            for module in self._whole.modules()
        ]
        try:
            self.keep(self._whole, number)
            yield
        finally:
            for module, attributes in held:
                vars(module).clear()
                vars(module).update(attributes)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value


class StageModel(nn.Module):
    """A stage, which a script calls as if it were the whole model.

    Only the last stage computes a loss. So a function of the loss is called on every rank: on the
    last stage it gets the outputs of the whole model, on others it ends where it calls the model.
    """

    def __init__(self, stage: nn.Module, number: int, num_stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self._is_asked = False
        self._received: tuple[Tensor, ...] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the whole model, on the last stage."""
        if self._is_asked:
            raise _CalledSignal(args, kwargs)
        received, self._received = self._received, None
        if received is None:
            raise LayoutRefusedError(
                "with parallel.pp above 1 call the model once in each call of the function that "
                "session.train_step or session.evaluate gets, and nowhere else",
                axis="pp",
            )
        return self.stage(*received, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the model has, such as the ``config`` of one of ``transformers``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("stage"), name)

    def called_with(self, loss_of: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what ``loss_of`` calls the model with.

        Raises:
            TaskError: It does not call it.
        """
        self._is_asked = True
        try:
            loss_of()
        except _CalledSignal as called:
            return called.args, called.kwargs
        finally:
            self._is_asked = False
        raise TaskError("session.train_step: the function returned without calling the model")

    def compute(self, loss_of: Callable[[], Any], received: tuple[Tensor, ...]) -> Any:
        """Return what this stage makes of a micro-batch: outputs, or the last one's loss.

        Args:
            loss_of: The script's function of the loss, on the micro-batch.
            received: Outputs of the stage before; none on the first.
        """
        if self.is_last:
            self._received = received
            returned = loss_of()
            if self._is_waiting():
                raise TaskError("session.train_step: the function did not call the model")
            return returned
        args, kwargs = self.called_with(loss_of)
        return self.stage(*(args if self.is_first else received), **kwargs)

    def _is_waiting(self) -> bool:
        return self._received is not None


class _CalledSignal(BaseException):
    """The script called the model; passes through its handlers of exceptions."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.args, self.kwargs = args, kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHooks:
    """Calls around each pass, by its number.

    Attributes:
        begin: Called before a forward pass.
        weigh: Called on the last stage with what the script's function returned; returns the loss
            to differentiate.
        begin_backward: Called before a backward pass.
        end: Called after it.
    """

    begin: Callable[[int], None]
    weigh: Callable[[int, Any], Tensor]
    begin_backward: Callable[[int], None] = lambda _number: None
    end: Callable[[int], None] = lambda _number: None


class Pipeline:
    """Runs passes through the stages. Every rank has one, and calls the same at the same time.

    Args:
        dtype: The dtype that activations have; None for that of the parameters.
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
        self._model, self._stages, self._dtype = model, stages, dtype
        self._mesh, self._device = mesh, device
        self._training: tuple[PipelineScheduleSingle, _Passes] | None = None

    def train(
        self, batches: Sequence[Any], loss_of: Callable[[Any], Any], hooks: PassHooks
    ) -> None:
        """Run a forward and a backward pass of every micro-batch, and add up the gradients.

        Raises:
            TaskError: There are fewer micro-batches than stages, or they differ in shape.
        """
        num_stages = self._mesh.layout.pp
        if len(batches) < num_stages:
            raise TaskError(
                f"parallel.pp={num_stages} needs as many micro-batches on each data-parallel rank, "
                f"and there are {len(batches)}; raise train.global_batch or lower train.micro_batch"
            )
        if self._training is None:
            self._training = self._schedule(Schedule1F1B, batches, loss_of)
        schedule, passes = self._training
        with passes.running(batches, loss_of, hooks):
            schedule.step(target=torch.arange(len(batches)), return_outputs=False)

    def evaluate(
        self, batches: Sequence[Any], loss_of: Callable[[Any], Any], hooks: PassHooks
    ) -> None:
        """Run a forward pass of every micro-batch."""
        schedule, passes = self._schedule(ScheduleGPipe, batches, loss_of)
        with torch.no_grad(), passes.running(batches, loss_of, hooks):
            schedule.eval(target=torch.arange(len(batches)), return_outputs=False)

    def _schedule(
        self,
        kind: type[Schedule1F1B | ScheduleGPipe],
        batches: Sequence[Any],
        loss_of: Callable[[Any], Any],
    ) -> tuple[PipelineScheduleSingle, _Passes]:
        """Return a schedule for micro-batches of this number and shape."""
        model = self._model
        args, kwargs = model.called_with(lambda: loss_of(batches[0]))
        number = self._mesh.stage
        *_, inputs, outputs = self._stages.described(number, args, kwargs, self._dtype)
        passes = _Passes(model, outputs)
        # Given shapes, torch runs no pass of its own to find them.
        stage = _Stage(
            passes,
            number,
            self._mesh.layout.pp,
            self._device,
            input_args=() if model.is_first else _differentiable(inputs),
            output_args=_differentiable(
                (torch.empty((), device="meta"),) if model.is_last else outputs
            ),
            group=self._mesh.stages,
        )
        schedule = kind(stage, len(batches), loss_fn=_loss_itself, scale_grads=False)
        return schedule, passes


class _Stage(PipelineStage):
    """torch's stage, which says the number of each pass."""

    submod: _Passes

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        self.submod.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002
        last_backward: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        if self.has_backward:
            self.submod.hooks.begin_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            self.submod.hooks.end(bwd_chunk_id)


class _Passes(nn.Module):
    """The module that torch's stage calls for a forward pass.

    The sharded model is no child of it: torch would decide when FSDP2 reduces gradients, which the
    step does.
    """

    number: int
    hooks: PassHooks

    def __init__(self, model: StageModel, outputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._compute, self._is_last = model.compute, model.is_last
        self._shapes = [tuple(output.shape) for output in outputs]
        self._batches: Sequence[Any] = ()
        self._loss_of: Callable[[Any], Any] = lambda _batch: None
        self._error: BaseException | None = None

    @contextmanager
    def running(
        self, batches: Sequence[Any], loss_of: Callable[[Any], Any], hooks: PassHooks
    ) -> Iterator[None]:
        """Compute these micro-batches, and raise what a pass raised, as it was."""
        self._batches, self._loss_of, self.hooks = batches, loss_of, hooks
        try:
            yield
        except RuntimeError:
            # torch raises one of its own, with the inputs of the pass.
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._batches, self._error = (), None

    def forward(self, *received: Tensor) -> Any:
        """Return the outputs for the next stage; the last one's weighted loss."""
        try:
            return self._forward(received)
        except BaseException as error:
            self._error = error
            raise

    def _forward(self, received: tuple[Tensor, ...]) -> Any:
        number = self.number
        self.hooks.begin(number)
        returned = self._compute(lambda: self._loss_of(self._batches[number]), received)
        if self._is_last:
            return self.hooks.weigh(number, returned)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != self._shapes:
            raise LayoutRefusedError(
                f"with parallel.pp above 1 all micro-batches have one shape: a stage returned "
                f"{shapes}, and {self._shapes} for the first; pad them to one length",
                axis="pp",
            )
        return returned


def _loss_itself(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


def _differentiable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.requires_grad_(one.is_floating_point()) for one in tensors)


def _refuse_misfits(whole: nn.Module, held: Sequence[Collection[str]]) -> None:
    """Raise ``TaskError`` unless each parameter is on one stage; ``held`` is what each one has."""
    kind, num_stages = type(whole).__name__, len(held)
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in _places(whole).items():
        by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        on = [number for number, each in enumerate(held) if any(name in each for name in names)]
        if len(names) > 1 and len(on) > 1:
            raise LayoutRefusedError(
                f"parallel.pp={num_stages}: {' and '.join(names)} of model {kind} are one "
                f"parameter on stages {', '.join(map(str, on))}; untie them (model.tied: false, "
                "or tie_word_embeddings=False of transformers), or write parallel.pp: 1",
                axis="pp",
            )
        if len(on) != 1:
            where = f"on stages {', '.join(map(str, on))}" if on else "on no stage"
            raise LayoutRefusedError(
                f"parallel.pp={num_stages}: the plan leaves {names[0]} of model {kind} {where}; "
                "each parameter must be on one: write another keep_stage, or parallel.pp: 1",
                axis="pp",
            )


def _places(model: nn.Module) -> dict[str, nn.Parameter]:
    return own_names(model.named_parameters(remove_duplicate=False))
