"""Pipeline stages of a model, which a script calls as if they were the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.errors import TaskError
from workers.parallel.fsdp import own_names
from workers.parallel.tensor import ModelPlan
from workers.parallel.torch_names import tree_map

__all__ = ["StageModel", "cut_stages", "described"]


def cut_stages(
    build: Callable[[], nn.Module], plan: ModelPlan, num_stages: int, number: int
) -> list[nn.Module]:
    """Return the stages up to ``number`` of a model, and that one again, on the meta device.

    Args:
        build: Makes the whole model.
        plan: How to cut it.
        num_stages: Number of stages.
        number: The last stage to return, twice: once to be sharded, once to be described.

    Raises:
        TaskError: There is no plan, a parameter is in no stage or in several, or stages share one.
    """
    with torch.device("meta"):
        whole, stages = build(), [build() for _ in range(num_stages)]
        again = build()
    kind = type(whole).__name__
    if plan.keep_stage is None:
        raise TaskError(
            f"parallel.pp={num_stages}: model {kind} has no plan for it; give one, "
            "session.model(build, plan=everstep.ModelPlan(keep_stage=...)), or write parallel.pp: 1"
        )
    for at, stage in enumerate(stages):
        plan.keep_stage(stage, at, num_stages)
    plan.keep_stage(again, number, num_stages)
    _refuse_misfits(whole, stages)
    return [*stages[: number + 1], again]


def described(
    stages: Sequence[nn.Module], args: Any, kwargs: Any, dtype: torch.dtype | None
) -> list[tuple[Tensor, ...]]:
    """Return what goes into each stage, and out of the last one, as tensors without values.

    Args:
        stages: The first stages, on the meta device.
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
    with torch.no_grad():
        for stage in stages:
            returned = stage.to(dtype)(*found[-1], **named)
            found.append(returned if isinstance(returned, tuple) else (returned,))
    return found


class StageModel(nn.Module):
    """A stage, which a script calls as if it were the whole model.

    Only the last stage computes a loss. So a function of the loss is called on every rank: on the
    last stage it gets the outputs of the whole model, on others it ends where it calls the model.

    Args:
        stage: The stage, sharded.
        number: Its number.
        num_stages: Number of stages.
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
            raise TaskError(
                "with parallel.pp above 1 call the model once in each call of the function that "
                "session.train_step or session.evaluate gets, and nowhere else"
            )
        return self.stage(*received, **kwargs)

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


def _refuse_misfits(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raise ``TaskError`` unless each parameter is on one stage."""
    kind, num_stages = type(whole).__name__, len(stages)
    held = [_places(stage).keys() for stage in stages]
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in _places(whole).items():
        by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        on = [number for number, each in enumerate(held) if not each.isdisjoint(names)]
        if len(names) > 1 and len(on) > 1:
            raise TaskError(
                f"parallel.pp={num_stages}: {' and '.join(names)} of model {kind} are one "
                f"parameter on stages {', '.join(map(str, on))}; untie them (model.tied: false), "
                "or write parallel.pp: 1"
            )
        if len(on) != 1:
            where = f"on stages {', '.join(map(str, on))}" if on else "on no stage"
            raise TaskError(
                f"plan: keep_stage leaves {names[0]} of model {kind} {where}; each parameter must "
                "be on one"
            )


def _places(model: nn.Module) -> dict[str, nn.Parameter]:
    return own_names(model.named_parameters(remove_duplicate=False))
