"""Parts of a model that only some micro-batches use train as in one process, for any layout."""

import runpy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ucp_core
from tests.support.attempts import curve, finish, of_script, reset, small_units
from tests.support.foreign_reading import loaded
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from workers.data import random_seed, seed_all
from workers.settings import ParallelSettings, Settings

SCRIPT = Path(__file__).parents[1] / "support/train_parts.py"
STEPS = 6
NUM_MICRO_BATCHES = 8


def settings(*arguments: str, reshard: bool = False, **train: Any) -> Settings:
    chosen = {
        "steps": STEPS, "global_batch": 2 * NUM_MICRO_BATCHES, "micro_batch": 2, "lr": 0.01,
        "warmup_steps": 0, "schedule": "constant", "clip_norm": 0.0, "deterministic": True, **train,
    }  # fmt: skip
    made = of_script(SCRIPT, *arguments, every_steps=STEPS, **chosen)
    return replace(made, parallel=ParallelSettings(reshard_after_forward=reshard))


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a run of a model that is one unit, or many as a large one is."""
    (tmp_path / "run").mkdir()
    with Run(tmp_path / "run", begin_with=request.param) as opened:
        yield opened


def trained(run: Run, chosen: Settings, **layout: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train in a layout; return the losses, and the weights and state at the end."""
    over = ParallelLayout(**layout)
    finish(run, chosen, num_workers=over.world_size, layout=over)
    losses = [loss for _, (loss, _) in sorted(curve(run.directory).items())]
    checkpoint = ucp_core.open(f"{run.directory}/checkpoints/step-{STEPS:08}")
    found = {"/".join(key): loaded(checkpoint, *key) for key in checkpoint.state_map.entries}
    reset(run)
    return losses, found


def plain_torch(taken: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Return the same of torch alone, on the samples that a worker alone took."""
    script: Any = runpy.run_path(str(SCRIPT), run_name="script")
    torch.manual_seed(0)
    model = script["Parts"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    batches = iter(taken.read_text().splitlines())
    losses = []
    for step in range(1, STEPS + 1):
        script["Parts"].step = step
        total = 0.0
        for number in range(NUM_MICRO_BATCHES):
            seed_all(random_seed(0, step, number))
            indices = [int(one) for one in next(batches).split()]
            loss = script["loss_of"](model, indices) / NUM_MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    named = dict(model.named_parameters())
    found = {f"{name}/weight": one.detach() for name, one in named.items()}
    for name, one in named.items():
        for slot in ("exp_avg", "exp_avg_sq") if one in optimizer.state else ():
            found[f"{name}/{slot}"] = optimizer.state[one][slot]
    return losses, found


def compare(
    ours: tuple[list[float], Mapping[str, Tensor]], theirs: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Compare losses, weights, and which parameters have state: those that were used."""
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    assert not any(key.startswith("tail.never.") and "exp" in key for key in theirs[1])
    for key, value in theirs[1].items():
        assert torch.allclose(ours[1][key].view(value.shape), value, atol=1e-5), key


@pytest.mark.parametrize(
    ("parts", "reshard"),
    # One unit stays gathered anyway.
    [(None, False), (small_units, False), (small_units, True)],
    indirect=["parts"],
    ids=["one unit", "units", "dropped units"],
)
def test_parts_train_to_the_bit_alike_for_any_number_of_workers(
    parts: Run, tmp_path: Path, *, reshard: bool
) -> None:
    """FSDP2 adds the gradient of one part to another where ranks use different ones."""
    chosen = settings(f"taken={tmp_path / 'taken'}", reshard=reshard)
    losses, state = trained(parts, chosen)
    for number in (2, 3, 4):
        losses_of_several, state_of_several = trained(parts, chosen, dp_shard=number)
        assert losses_of_several == losses
        assert state_of_several.keys() == state.keys()
        assert all(torch.equal(state_of_several[key], state[key]) for key in state)
    compare((losses, state), plain_torch(tmp_path / "taken"))


@pytest.mark.parametrize("parts", [small_units], indirect=True, ids=["units"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_and_shards_train_along_one_curve(
    parts: Run, tmp_path: Path, precision: str
) -> None:
    """Copies are summed in another way than shards. In bf16 earlier passes have float32 sums.

    Reduced after every pass, ranks must agree in each of them which parts have a gradient.
    """
    taken = tmp_path / "taken"
    chosen = settings(f"taken={taken}", reshard=True, deterministic=False, precision=precision)
    alone = trained(parts, chosen)
    if precision == "fp32":
        compare(alone, plain_torch(taken))
    often = replace(chosen, train=replace(chosen.train, reduce_gradients="every_pass"))
    layouts = [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3}]
    # Copies of whole parts are summed in one way, in whichever precision they compute.
    layouts += [{"dp_replicate": 2}] if precision == "fp32" else []
    for layout in layouts:
        for how in (chosen, often):
            found = trained(parts, how, **layout)
            if precision == "fp32":
                compare(found, alone)
            assert found[0] == pytest.approx(alone[0], abs=2e-2)


@pytest.mark.parametrize("parts", [small_units], indirect=True, ids=["units"])
def test_cut_layers_and_stages_train_along_one_curve(parts: Run, tmp_path: Path) -> None:
    """Each stage has units of its own, and several micro-batches are open at a time.

    Parameters of several stages have one step count, so all but ``never`` are used in each step.
    """
    chosen = settings(f"taken={tmp_path / 'taken'}", "by=data", reshard=True)
    alone = trained(parts, chosen)
    for layout in ({"pp": 2}, {"pp": 2, "dp_shard": 2}):
        found = trained(parts, chosen, **layout)
        assert found[0] == alone[0]
        assert all(torch.equal(found[1][key], alone[1][key]) for key in alone[1])
    often = settings("by=data", deterministic=False, reduce_gradients="every_pass")
    compare(trained(parts, often, tp=2, dp_shard=2), alone)
    compare(trained(parts, often, pp=2, dp_shard=2), alone)
