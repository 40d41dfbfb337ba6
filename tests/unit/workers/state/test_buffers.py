"""State in buffers is refused, and only state: nothing saves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep import Session, Settings, run
from workers.errors import TaskError
from workers.settings import TrainSettings
from workers.state import PersistentBuffers

TABLE = torch.arange(4.0).outer(torch.ones(4))


class Scaled(nn.Module):
    """Multiplies by a buffer and then does with it what it is told."""

    def __init__(self, use: Callable[[Any], object], *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", TABLE.clone(), persistent=persistent)
        self.register_buffer("late", None, persistent=persistent)
        self.use = use

    def forward(self, inputs: Tensor) -> Tensor:
        table: Any = self.table
        output: Tensor = self.linear(inputs @ table)
        self.use(self)
        return output


def count(module: Any) -> None:
    module.table += 1


def fill_late(module: Any) -> None:
    module.late = torch.ones(1)


def replace(module: Any) -> None:
    module.table = module.table * 0.9


def point_elsewhere(module: Any) -> None:
    module.table.data = torch.zeros(4, 4)


def write_unseen(module: Any) -> None:
    module.table.data.mul_(0.9)


def register(module: Any) -> None:
    module.linear.register_buffer("mean", torch.zeros(4))


def write_in_evaluation(module: Any) -> None:
    if not module.training:
        with torch.inference_mode():
            module.table.zero_()


def look(module: Any) -> None:
    module.state_dict()
    module.to("cpu").float()
    module.table = module.table.detach()
    with torch.no_grad():
        module.train(not module.training)
        module.table[1:].sum().item()


def task(build: Callable[[], nn.Module], *, evaluates: bool = False) -> Callable[[Session], None]:
    def train(session: Session) -> None:
        model = session.model(build)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for step in session.steps(16):
            for samples in step.micro_batches():
                step.backward(model(torch.ones(len(samples), 4)).square().mean(), tokens=1)
            step.apply()
            if evaluates:
                session.evaluate(lambda samples: (model(torch.ones(len(samples), 4)).mean(), 1), 4)

    return train


def train(directory: Path, task: Callable[[Session], None], **settings: Any) -> None:
    small = TrainSettings(global_batch=4, micro_batch=2, warmup_steps=0, **settings)
    run(task, directory=str(directory), settings=Settings(train=small))


@pytest.mark.parametrize(
    ("use", "place"),
    [
        (count, r"buffer table of the model \(Scaled\)"),
        (replace, "buffer table"),
        (point_elsewhere, "buffer table"),
        (write_unseen, "buffer table"),
        (fill_late, "buffer late"),
        (register, r"buffer mean of module linear \(Linear\)"),
    ],
)
def test_a_model_that_changes_a_buffer_is_refused_after_its_first_step(
    tmp_path: Path, use: Callable[[Any], None], place: str
) -> None:
    """The run would go on after a fault as if the buffer had never changed."""
    with pytest.raises(TaskError, match=rf"in step 1\n[\s\S]*{place}[\s\S]*persistent=False"):
        train(tmp_path, task(lambda: Scaled(use)), steps=2)


def test_a_change_outside_of_training_is_seen_in_the_next_step(tmp_path: Path) -> None:
    """Nobody but the evaluation touched it; the step before was as it should be."""
    script = task(lambda: Scaled(write_in_evaluation), evaluates=True)

    with pytest.raises(TaskError, match=r"in step 2\n[\s\S]*buffer table"):
        train(tmp_path, script, steps=3)


def test_spectral_norm_is_refused_by_name(tmp_path: Path) -> None:
    """Its vectors look like a detail of the layer; each worker and attempt has its own."""
    normed = nn.utils.parametrizations.spectral_norm

    with pytest.raises(TaskError, match=r"buffer _u of module 0\.parametrizations\.weight\.0"):
        train(tmp_path, task(lambda: nn.Sequential(normed(nn.Linear(4, 4)))), steps=2)


@pytest.mark.parametrize("mode", [{}, {"deterministic": True}], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Scaled(look),
        lambda: Scaled(type),
        lambda: Scaled(replace, persistent=False),
        lambda: Scaled(fill_late, persistent=False),
        lambda: nn.Linear(4, 4),
    ],
    ids=["looked at", "left alone", "not persistent", "filled late", "without"],
)
def test_a_model_without_state_in_buffers_trains_and_resumes(
    tmp_path: Path, build: Callable[[], nn.Module], mode: dict[str, bool]
) -> None:
    """Filling, moving, evaluating and loading touch the very same tensors."""
    script = task(build, evaluates=True)
    train(tmp_path, script, steps=2, **mode)

    train(tmp_path, script, steps=4, **mode)

    assert len((tmp_path / "metrics/rank0.jsonl").read_text().splitlines()) == 4


def test_a_tensor_of_the_same_value_is_let_be_until_it_has_another() -> None:
    """A model may convert a table when it is used first; it would do so again when it resumes."""
    model = Scaled(look)
    model.table = TABLE.clone()
    buffers = PersistentBuffers(model)
    for step, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        model.table = model.table.to(dtype)
        buffers.check(step)

    model.table[0] += 1

    with pytest.raises(TaskError, match="after step 3") as refused:
        buffers.check(3)
    assert refused.value.facts == {"module": "", "buffer": "table", "step": 3}
