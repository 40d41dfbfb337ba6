"""A compiled model through the session: the names, the state and the curve of the plain one."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.workers.train.test_session import Attempts
from workers.parallel import fsdp
from workers.protocol import Completed
from workers.train import Session

INPUTS = torch.linspace(-1, 1, 128).reshape(16, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.layer(self.norm(inputs)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)  # type: ignore[no-any-return]


def plain() -> nn.Module:
    return Model()


def regional() -> nn.Module:
    """Return the model with every block compiled, as is usual for a model of equal blocks."""
    model = Model()
    for number, block in enumerate(model.layers):
        compiled: Any = torch.compile(block, backend="aot_eager")
        model.layers[number] = compiled
    return model


def in_place() -> nn.Module:
    """Return the model with every block compiled without a module around it."""
    model = Model()
    for block in model.layers:
        block.compile(backend="aot_eager")
    return model


def whole() -> nn.Module:
    compiled: Any = torch.compile(Model(), backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


def fit(session: Session, *, build: Callable[[], nn.Module]) -> None:
    model = session.model(build)
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    for _ in session.steps(len(INPUTS)):
        session.train_step(
            lambda samples: functional.mse_loss(model(INPUTS[samples]), INPUTS[samples].flip(1))
        )


def train(
    directory: Path, attempts: Sequence[tuple[Callable[[], nn.Module], int]]
) -> tuple[list[float], list[int]]:
    """Train with each way to build, up to a step each, in this process.

    Returns:
        The loss of every step, and the number of graphs compiled after every attempt.
    """
    runner, resume, graphs = Attempts(directory, 0), (0, 0), []
    for number, (build, steps) in enumerate(attempts, start=1):
        outcome = runner.train(functools.partial(fit, build=build), steps=steps, resume=resume)
        assert outcome == Completed(attempt=number, step=steps), outcome
        resume = (steps, number)
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    runner.close()
    lines = (directory / "run/metrics/rank0.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], graphs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the plain model."""
    return train(tmp_path_factory.mktemp("plain"), [(plain, 4)])[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13, fake tensors
@pytest.mark.parametrize(
    ("build", "one_unit_bytes"),
    [(regional, 0), (regional, fsdp.SMALL_BYTES_MAX), (in_place, 0), (whole, 0)],
)
def test_a_compiled_model_learns_and_is_saved_as_the_plain_one(
    build: Callable[[], nn.Module],
    one_unit_bytes: int,
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is compiled before it is sharded, and its modules are called otherwise.

    The plain model goes on from what it saved, and it from what the plain one saved. Later attempts
    of a process compile nothing: torch gives up after 8 times.
    """
    monkeypatch.setattr(fsdp, "SMALL_BYTES_MAX", one_unit_bytes)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    losses, graphs = train(tmp_path, [(build, 1), (plain, 2), (build, 3), (build, 4)])

    assert losses == pytest.approx(undisturbed, rel=1e-6)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4
    names = [
        json.loads((tmp_path / f"run/checkpoints/step-{step:08}/manifest.json").read_text())
        for step in (1, 2)
    ]
    assert names[0]["tensors"].keys() == names[1]["tensors"].keys()
