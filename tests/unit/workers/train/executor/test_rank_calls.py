"""A model whose forward pass depends on the number of workers is refused before step 1."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from everstep import Session, TaskError, run

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Scaled(nn.Module):
    """Divides by the number of ranks, which it calls by a name of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / get_world_size()


class Guarded(nn.Module):
    """Hides an error, so an exception in the call would change the result instead."""

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            rank = dist.get_rank()
        except Exception:  # noqa: BLE001
            rank = 1
        return inputs + rank


class Gathered(nn.Module):
    """Sums over ranks, in a function that it calls."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self._summed(inputs)

    def _summed(self, inputs: Tensor) -> Tensor:
        total = inputs.detach().clone()
        dist.all_reduce(total)
        return inputs + total


class Told(Scaled):
    """Says that its result is the same for any number of ranks."""

    depends_on_ranks = False


class Careful(nn.Module):
    """Asks only whether there are ranks."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + float(is_initialized())


def train(directory: Path, build: Any, *, compiled: bool = False) -> list[int]:
    """Return the steps that were taken."""
    taken: list[int] = []

    def task(session: Session) -> None:
        model = session.model(build)
        called = torch.compile(model, backend="eager") if compiled else model
        session.optimizer(lambda held: torch.optim.SGD(held.values()))
        for step in session.steps(len(INPUTS)):
            # Outside of the model it may be asked for.
            assert dist.get_rank() == session.rank
            session.train_step(lambda indices: called(INPUTS[indices]).square().mean())
            taken.append(step.number)

    run(task, directory=str(directory), steps=2, global_batch=4, micro_batch=2, warmup_steps=0)
    return taken


@pytest.mark.parametrize(
    ("kind", "call"),
    [(Scaled, "get_world_size"), (Guarded, "get_rank"), (Gathered, "all_reduce")],
)
def test_a_forward_pass_that_uses_ranks_is_refused_with_its_place(
    tmp_path: Path, kind: type[nn.Module], call: str
) -> None:
    """Alone, too: that is where a script is tried first."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(kind(), nn.Linear(2, 1)))

    with pytest.raises(TaskError) as caught:
        train(tmp_path, build)

    place = rf"1.0 ({kind.__name__}) calls torch.distributed.{call} in {__file__}:"
    assert place in str(caught.value)
    assert "depends_on_ranks = False" in str(caught.value)
    assert not list(tmp_path.glob("checkpoints/*")), "a step was taken"


def test_every_such_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"1 \(Scaled\) .*; 2 \(Guarded\)"):
        train(tmp_path, lambda: nn.Sequential(nn.Linear(2, 1), Scaled(), Guarded()))


def test_a_compiled_model_is_refused_too(tmp_path: Path) -> None:
    """The compiler asks once, and puts the number into the graph."""
    with pytest.raises(TaskError, match="get_world_size"):
        train(tmp_path, lambda: nn.Sequential(nn.Linear(2, 1), Scaled()), compiled=True)


@pytest.mark.parametrize("kind", [Told, Careful])
def test_a_module_may_say_that_ranks_do_not_matter(tmp_path: Path, kind: type[nn.Module]) -> None:
    real = dist.distributed_c10d._rank_not_in_group

    assert train(tmp_path, lambda: nn.Sequential(nn.Linear(2, 1), kind())) == [1, 2]

    assert list(tmp_path.glob("checkpoints/*"))
    assert dist.distributed_c10d._rank_not_in_group is real, "torch is as it was"
