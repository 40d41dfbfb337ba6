"""Parameters without a dim or an element train as others, for any layout."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ucp_core
from tests.support.attempts import curve, finish, newest, of_script, reset, result
from tests.support.foreign_reading import loaded
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from ucp_core.storage import LocalStore
from workers.protocol import Yielded
from workers.settings import ParallelSettings, Settings

SCRIPT = Path(__file__).parents[1] / "support/train_odd_shapes.py"
STEPS = 6


def settings(*arguments: str, **train: Any) -> Settings:
    chosen = {
        "steps": STEPS, "global_batch": 8, "micro_batch": 2, "lr": 0.02, "warmup_steps": 0,
        "schedule": "constant", "deterministic": True, **train,
    }  # fmt: skip
    return of_script(SCRIPT, *arguments, **chosen)


def saved(directory: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Return weights and state of a checkpoint."""
    checkpoint = ucp_core.open(f"{directory}/checkpoints/step-{step:08}")
    return {"/".join(key): loaded(checkpoint, *key) for key in checkpoint.state_map.entries}


def plain_torch() -> dict[str, Tensor]:
    """Return the same of torch alone, on what the script trains."""
    script: Any = runpy.run_path(str(SCRIPT), run_name="script")
    torch.manual_seed(0)
    model = script["Scaled"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs = script["INPUTS"]
    for _ in range(STEPS):
        loss = (model(inputs) - inputs.exp()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = {f"{name}/weight": one.detach() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        held = optimizer.state.get(one, {})
        found |= {f"{name}/{slot}": held[slot] for slot in held if slot != "step"}
    return found


@pytest.mark.parametrize(
    ("layout", "deterministic", "stages"),
    [
        (ParallelLayout(), False, 1),
        (ParallelLayout(dp_shard=3), False, 1),
        (ParallelLayout(dp_shard=3), True, 1),
        (ParallelLayout(dp_replicate=2), False, 1),
        (ParallelLayout(dp_shard=2, tp=2), True, 1),
        (ParallelLayout(dp_shard=2, pp=2), True, 1),
        (ParallelLayout(dp_shard=2, pp=2), True, 2),
        (ParallelLayout(pp=2), False, 1),
    ],
    ids=str,
)
def test_they_train_as_in_plain_torch(
    run: Run,
    layout: ParallelLayout,
    deterministic: bool,  # noqa: FBT001
    stages: int,
) -> None:
    """Every worker has them, and FSDP2 adds up no gradients of these."""
    chosen = replace(
        settings("all", deterministic=deterministic),
        parallel=ParallelSettings(stages_per_worker=stages),
    )
    finish(run, chosen, num_workers=layout.world_size, layout=layout)
    found, expected = saved(run.directory), plain_torch()

    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].shape == one.shape
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)
    assert found["head.empty/exp_avg"].shape == (0, 3)
    assert "head.unused/exp_avg" not in found


@pytest.mark.parametrize("kind", ["own", "fused"])
def test_their_bits_do_not_depend_on_the_number_of_workers(run: Run, kind: str) -> None:
    """This includes workers that die; the last of five has no micro-batch."""
    seen = set()
    for num_workers in (1, 2, 3, 5):
        finish(run, settings(kind), num_workers=num_workers)
        seen.add(_bits(run))
        reset(run)
    for num_workers in (2, 4):
        # The last rank leaves after one step and takes the others with it.
        resume = newest(run) if num_workers == 4 else (0, 0)
        members = run.begin(settings(kind), num_workers=num_workers, resume=resume)
        members[-1].yield_at_boundary(len(run.lineage))
        assert all(isinstance(trainer.left().outcome, Yielded) for trainer in members)
    finish(run, settings(kind), num_workers=3, resume=newest(run))

    assert seen == {_bits(run)}


def test_a_run_starts_from_what_was_exported(run: Run, tmp_path: Path) -> None:
    """torch takes the file too, whose keys must be those of the model."""
    finish(run, settings("own"), num_workers=2)
    trained = saved(run.directory)
    checkpoint = ucp_core.open(f"{run.directory}/checkpoints/step-{STEPS:08}")
    for name in ("huggingface", "dcp", "universal"):
        ucp_core.export(
            checkpoint, LocalStore(), str(tmp_path / name), format=name, memory_bytes=64 << 20
        )
    script: Any = runpy.run_path(str(SCRIPT), run_name="script")
    script["Scaled"]().load_state_dict(load_file(tmp_path / "huggingface/model.safetensors"))
    digests = set()
    state: Any
    for name, state in (("huggingface", "weights"), ("dcp", "weights"), ("universal", "all")):
        for num_workers in (1, 3):
            reset(run)
            chosen = settings("own", steps=1)
            start = replace(chosen.run, init_from=str(tmp_path / name), init_state=state)
            finish(run, replace(chosen, run=start), num_workers=num_workers)
            first = saved(run.directory, 1)
            assert torch.equal(first["head.temperature/weight"], trained["head.temperature/weight"])
            scale = trained["head.logit_scale/weight"]
            assert 0 < abs(float(first["head.logit_scale/weight"] - scale)) < 0.1
            assert abs(float(scale) - 0.1) > 0.02
            digests.add((state, result(run)["weights_digest"]))

    assert len(digests) == 2


def _bits(run: Run) -> str:
    state = {name: one.tolist() for name, one in sorted(saved(run.directory).items())}
    return str((result(run)["weights_digest"], curve(run.directory), state))
