"""torch's ``GradScaler`` with a session: the gradients of float16 are scaled, and may overflow."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from everstep import Session, Settings, run
from workers.settings import CheckpointSettings

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


def train(
    directory: Path,
    scale: float | None,
    *,
    steps: int,
    clip_norm: float = 0.0,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    samples: int | None = None,
) -> list[Any]:
    """Train; return weights and scale after each step. ``samples`` are the same in each."""
    seen: list[Any] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: make(named.values()))
        scaler = GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=bool(scale))
        session.register("scaler", scaler)

        def loss_of(indices: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                outputs: Tensor = model(INPUTS[indices if samples is None else slice(samples)])
            return outputs.float().square().mean()

        for step in session.steps(len(INPUTS)):
            session.train_step(loss_of)
            weights: Any = model.weight
            seen.append((weights.full_tensor().clone(), scaler.get_scale(), step.grad_norm))

    run(
        task, directory=str(directory),
        settings=Settings(checkpoint=CheckpointSettings(every_steps=1, keep=0)),
        steps=steps, global_batch=4, micro_batch=2, lr=0.1, warmup_steps=0, schedule="constant",
        clip_norm=clip_norm,
    )  # fmt: skip
    return seen


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_a_power_of_two_changes_no_bit(tmp_path: Path, clip_norm: float) -> None:
    """Gradients, their norm and clipping are those of the loss without the scale."""
    plain = train(tmp_path / "plain", None, steps=4, clip_norm=clip_norm)
    scaled = train(tmp_path / "scaled", 2.0**16, steps=4, clip_norm=clip_norm)

    for (weights, _, norm), (same, _, same_norm) in zip(plain, scaled, strict=True):
        assert torch.equal(weights, same)
        assert math.isclose(norm, same_norm, rel_tol=1e-6)
    assert [scale for _, scale, _ in scaled] == [2.0**16, 2.0**16, 2.0**17, 2.0**17]


def test_a_step_that_overflows_is_left_out_and_a_run_resumes_from_it(tmp_path: Path) -> None:
    """Also from the first one, after which the optimizer has no state yet."""
    whole = train(tmp_path / "whole", 2.0**68, steps=12)
    for steps in (1, 3, 12):
        parts = train(tmp_path / "run", 2.0**68, steps=steps)

    left_out = [number for number, (_, _, norm) in enumerate(whole) if not math.isfinite(norm)]
    assert left_out[:2] == [0, 1]
    assert len(left_out) < 12
    assert torch.equal(whole[0][0], whole[1][0])
    assert not torch.equal(whole[-1][0], whole[0][0])
    assert whole[1][1] == 2.0**66
    assert all(torch.equal(one[0], other[0]) for one, other in zip(whole[3:], parts, strict=True))
    assert [scale for _, scale, _ in whole[3:]] == [scale for _, scale, _ in parts]
    first = json.loads((tmp_path / "run/metrics/rank0.jsonl").read_text().splitlines()[0])
    assert first["grad_norm"] is None
    assert math.isfinite(first["loss"])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.NAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
        partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    ],
    ids=["nadam", "rprop", "asgd", "sgd", "adagrad"],
)
def test_an_optimizer_starts_as_new_after_steps_that_overflow(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """The state of a version without a step is zero, and that of these is not when they start."""
    plain = train(tmp_path / "plain", None, steps=12, make=make, samples=4)
    whole = train(tmp_path / "whole", 2.0**68, steps=12, make=make, samples=4)
    train(tmp_path / "run", 2.0**68, steps=1, make=make, samples=4)
    parts = train(tmp_path / "run", 2.0**68, steps=12, make=make, samples=4)

    assert not math.isfinite(whole[1][2])
    for found in (whole, parts):
        counted = [weights for weights, _, norm in found if math.isfinite(norm)]
        assert len(counted) > 3
        assert all(torch.equal(mine, one[0]) for mine, one in zip(counted, plain, strict=False))
