"""The micro-batches of a step, or of an evaluation, through the stages of a pipeline.

torch's schedules decide when a stage computes which pass, and send activations and gradients
between stages (1F1B: at most as many passes are open as there are stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from workers.errors import TaskError
from workers.parallel import Mesh, StageModel, described

__all__ = ["PassHooks", "Pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHooks:
    """What surrounds each pass, by its number.

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
        model: This rank's stage.
        stages: The stages up to this one, on the meta device.
        mesh: The ranks.
        device: The device to compute on.
        dtype: The dtype that activations have; None for that of the parameters.
    """

    def __init__(
        self,
        model: StageModel,
        stages: Sequence[nn.Module],
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
        *_, inputs, outputs = described(self._stages, args, kwargs, self._dtype)
        passes = _Passes(model, outputs)
        # Given shapes, torch runs no pass of its own to find them.
        stage = _Stage(
            passes,
            len(self._stages) - 1,
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
    """What torch's stage calls for a forward pass.

    The sharded model is no child of it: torch would decide when FSDP2 reduces gradients, which the
    step does.

    Attributes:
        number: The pass that comes next.
        hooks: What surrounds it.
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
            raise TaskError(
                f"with parallel.pp above 1 all micro-batches have one shape: a stage returned "
                f"{shapes}, and {self._shapes} for the first; pad them to one length"
            )
        return returned


def _loss_itself(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


def _differentiable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.requires_grad_(one.is_floating_point()) for one in tensors)
