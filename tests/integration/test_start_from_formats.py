"""Workers start from a checkpoint of each format, as plain torch would from what it held."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ucp_core
from tests.support.attempts import finish, lines, newest, reset
from tests.support.foreign_reading import checkpoint_fixture, loaded
from tests.support.train_named import (
    BATCH,
    LR,
    MICRO_BATCH,
    NUM_SAMPLES,
    Named,
    build_optimizer,
)
from tests.support.trainers import Run
from ucp_core.storage import open_store
from workers.data import DataOrder
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

SCRIPT = Path(__file__).parents[1] / "support/train_named.py"
FIXTURES = (
    "dcp_fsdp4",
    "ds_zero1_dp2",
    "ds_zero3_dp2",
    "ds_pp2_dp2_zero1",
    "ds_tp2_dp2_zero1",
    "megatron_core_tp2",
)
EXPORTED = ("universal", "huggingface")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with Run(tmp_path_factory.mktemp("run")) as run:
        yield run


def _trained(expected: dict[str, Tensor], num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train ``Named`` in plain torch, with the optimizer's state as it was; return the weights."""
    shapes = {n.removesuffix(".fp32"): v.shape for n, v in expected.items() if n.endswith(".fp32")}
    model = Named({name: tuple(shape) for name, shape in shapes.items()})
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(expected[f"{name}.fp32"])
            slots = ("exp_avg", "exp_avg_sq", "step")
            state = {s: expected[f"{name}.{s}"] for s in slots if f"{name}.{s}" in expected}
            if state:
                optimizer.state[parameter] = {k: v.clone() for k, v in state.items()}
    order = DataOrder(seed=0, num_samples=NUM_SAMPLES, global_batch=BATCH)
    losses = []
    for step in range(num_steps):
        samples = torch.from_numpy(order.at(np.arange(step * BATCH, (step + 1) * BATCH)))
        loss = torch.stack([model(part) for part in samples.split(MICRO_BATCH)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in named.items()}


def _source(name: str, directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return a checkpoint, and what it holds by ``<fqn>.<slot>``; its optimizer did four steps."""
    fixture = checkpoint_fixture(name if name in FIXTURES else FIXTURES[0])
    path, expected = fixture / "checkpoint", load_file(fixture / "expected.safetensors")
    names = [key.removesuffix(".fp32") for key in expected if key.endswith(".fp32")]
    expected |= {f"{fqn}.step": torch.tensor(4.0) for fqn in names}
    if name not in EXPORTED:
        return path, expected
    place = open_store(str(directory / name))
    ucp_core.export(ucp_core.open(path), *place, format=name, memory_bytes=64 << 20)
    if name == "huggingface":
        expected = {key: value for key, value in expected.items() if key.endswith(".fp32")}
    return directory / name, expected


@pytest.mark.parametrize("name", [*FIXTURES, *EXPORTED])
def test_two_workers_start_and_one_goes_on(workers: Run, tmp_path: Path, name: str) -> None:
    """Weights, moments and counts, of which each rank reads its boxes; and after a resume."""
    path, expected = _source(name, tmp_path)
    chosen = RunSettings(
        directory="run",
        script=str(SCRIPT),
        arguments=(str(path),),
        init_from=str(path),
        init_state="weights" if name == "huggingface" else "all",
    )

    def settings(steps: int) -> Settings:
        return Settings(
            run=chosen,
            train=TrainSettings(
                steps=steps,
                global_batch=BATCH,
                micro_batch=MICRO_BATCH,
                lr=LR,
                warmup_steps=0,
                schedule="constant",
            ),
            checkpoint=CheckpointSettings(every_steps=1, keep=0),
        )

    if workers.lineage:
        reset(workers)
    finish(workers, settings(3), num_workers=2)
    finish(workers, settings(5), num_workers=1, resume=newest(workers))

    losses, weights = _trained(expected, 5)
    assert [line["loss"] for line in lines(workers)] == pytest.approx(losses, abs=1e-6)
    held = ucp_core.open(workers.directory / "checkpoints/step-00000005")
    for fqn, value in weights.items():
        torch.testing.assert_close(loaded(held, fqn), value, atol=1e-6, rtol=0, msg=fqn)
