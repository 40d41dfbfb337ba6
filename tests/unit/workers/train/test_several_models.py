"""Several models and optimizers in one script: a GAN, a frozen teacher, an average of weights."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ucp_core
from everstep import Session, Settings, TaskError, run
from tests.support import train_gan
from workers.settings import CheckpointSettings

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)
EVERY_STEP = Settings(checkpoint=CheckpointSettings(every_steps=1, keep=0))


def train(directory: Path, task: Callable[[Session], None], *, steps: int) -> None:
    run(
        task, directory=str(directory), settings=EVERY_STEP, steps=steps, global_batch=4,
        micro_batch=2, warmup_steps=0, schedule="constant", lr=0.05,
    )  # fmt: skip


def digest(directory: Path) -> str:
    return str(json.loads((directory / "result.json").read_text())["weights_digest"])


def test_a_gan_goes_on_where_it_was(tmp_path: Path) -> None:
    """Before the generator's first update, too: its optimizer has no state yet."""
    train(tmp_path / "whole", train_gan.train, steps=7)
    for steps in (2, 4, 7):
        train(tmp_path / "run", train_gan.train, steps=steps)

    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
    held = ucp_core.open(tmp_path / "run/checkpoints/step-00000007").state_map.entries
    slots = {(key.fqn.partition(".")[0], key.slot) for key in held}
    assert slots == {
        *(("generator", slot) for slot in ("weight", "exp_avg", "exp_avg_sq")),
        *(("critic", slot) for slot in ("weight", "momentum_buffer")),
        ("average", "weight"),
        ("teacher", "weight"),
    }


def build_two() -> nn.ModuleDict:
    first = nn.Linear(2, 2)
    return nn.ModuleDict({"first": first, "second": nn.Linear(2, 2)})


def make_two(named: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([p for n, p in named.items() if n.startswith(name)], lr=0.1)
        for name in ("first.", "second.")
    ]


def whole(model: nn.Module) -> list[Tensor]:
    named: Any = model.parameters()
    return [one.full_tensor().clone() for one in named]


def test_a_step_updates_what_the_script_chooses(tmp_path: Path) -> None:
    """The loss of a generator goes through the critic, whose gradient must go nowhere."""
    changed: list[tuple[bool, bool]] = []
    norms: list[float] = []

    def task(session: Session) -> None:
        models = session.model(build_two)
        optimizers = session.optimizer(make_two)
        for step in session.steps(len(INPUTS)):
            before = [whole(models[name]) for name in ("first", "second")]
            chosen = {1: optimizers[:1], 2: optimizers[1:], 3: None, 4: None}[step.number]

            def loss_of(indices: Any, number: int = step.number) -> Tensor:
                inputs = models["first"](INPUTS[indices])
                # In the last step one model has no gradient.
                outputs: Tensor = inputs if number == 4 else models["second"](inputs)
                return outputs.square().mean()

            norms.append(session.train_step(loss_of, optimizers=chosen).grad_norm)
            after = [whole(models[name]) for name in ("first", "second")]
            first, second = (
                not all(map(torch.equal, *pair)) for pair in zip(before, after, strict=True)
            )
            changed.append((first, second))

    train(tmp_path, task, steps=4)

    assert changed == [(True, False), (False, True), (True, True), (True, False)]
    assert all(norm > 0 for norm in norms)


def test_each_optimizer_has_a_scheduler_of_its_own_or_that_of_the_settings(tmp_path: Path) -> None:
    rates: list[list[float]] = []

    def task(session: Session) -> None:
        models = session.model(build_two)
        first, second = session.optimizer(make_two)
        halving = session.register("lr", torch.optim.lr_scheduler.ExponentialLR(second, 0.5))
        for _ in session.steps(len(INPUTS)):
            session.train_step(
                lambda indices: models["second"](models["first"](INPUTS[indices])).square().mean()
            )
            rates.append([one.param_groups[0]["lr"] for one in (first, second)])
            halving.step()

    for steps in (2, 3):
        train(tmp_path, task, steps=steps)

    assert rates == [[0.05, 0.1], [0.05, 0.05], [0.05, 0.025]]


def test_evaluation_leaves_a_teacher_in_its_mode(tmp_path: Path) -> None:
    """Its dropout would be switched on by the first evaluation."""
    modes: list[tuple[bool, bool]] = []

    def task(session: Session) -> None:
        models = session.model(build_two)
        session.optimizer(make_two)
        models["second"].eval()
        session.evaluate(lambda i: (models["first"](INPUTS[i]).mean(), 1), 4)
        modes.append((models["first"].training, models["second"].training))
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda indices: models["first"](INPUTS[indices]).square().mean())

    train(tmp_path, task, steps=1)

    assert modes == [(True, False)]


def tied() -> nn.ModuleDict:
    models = build_two()
    models["second"].weight = models["first"].weight
    return models


def frozen() -> nn.ModuleDict:
    return copy.deepcopy(build_two()).requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "make", "told"),
    [
        (tied, make_two, "models first and second share the parameter weight"),
        (
            build_two,
            lambda named: [torch.optim.SGD(named.values(), lr=1.0) for _ in range(2)],
            r"first\.bias is in two optimizers \(SGD, SGD\)",
        ),
        (
            build_two,
            lambda _: [1.0],
            "returned float, not an optimizer; return a torch.optim.Optimizer",
        ),
        (frozen, make_two, "no parameter that an optimizer updates has a gradient"),
    ],
    ids=["tied", "twice", "no optimizer", "frozen"],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, build: Any, make: Any, told: str
) -> None:
    """By name, before the first update."""

    def task(session: Session) -> None:
        models = session.model(build)
        session.optimizer(make)
        inputs = INPUTS.clone().requires_grad_()
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda indices: models["first"](inputs[indices]).square().mean())

    with pytest.raises(TaskError, match=told):
        train(tmp_path, task, steps=1)


def test_an_optimizer_of_somebody_else_is_refused(tmp_path: Path) -> None:
    def task(session: Session) -> None:
        models = session.model(build_two)
        session.optimizer(make_two)
        other = torch.optim.SGD([torch.zeros(1)])
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda i: models["first"](INPUTS[i]).mean(), optimizers=[other])

    with pytest.raises(TaskError, match="SGD in optimizers is none of those"):
        train(tmp_path, task, steps=1)


def test_an_output_that_is_a_view_gives_no_warning_and_may_be_changed(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """FSDP2 warns at every newcomer's `squeeze`, and reduces nothing for one who writes `+=`."""

    class Flat(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).view(-1)

    def task(session: Session, *, in_place: bool) -> None:
        model = session.model(lambda: Flat(INPUTS.shape[1], 1))
        session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=1.0))

        def loss_of(indices: Any) -> torch.Tensor:
            outputs = model(INPUTS[indices])
            if in_place:
                outputs += 1.0
            else:
                outputs = outputs + 1.0
            loss: torch.Tensor = outputs.square().mean()
            return loss

        for _ in session.steps(len(INPUTS)):
            session.train_step(loss_of)

    for in_place in (True, False):
        (tmp_path / str(in_place)).mkdir()
        train(tmp_path / str(in_place), partial(task, in_place=in_place), steps=2)

    assert digest(tmp_path / "True") == digest(tmp_path / "False")
    assert not [one for one in recwarn if "view tensor" in str(one.message)]
