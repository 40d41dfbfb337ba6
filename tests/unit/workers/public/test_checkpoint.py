"""Checkpoints of a plain script in one process; those of several are in ``tests/integration``."""

import gc
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ucp_core
from everstep import checkpoint
from tests.arch.tree import ROOT
from tests.support.train_checkpointed import Model, adamw, build, train, whole
from ucp_core.storage import LocalStore, claim, next_claim
from workers.state import HostBuffer, StateEntry

Trained = tuple[Model, torch.optim.AdamW]


def trained(num_steps: int = 2) -> Trained:
    model = build()
    optimizer = adamw(model)
    for step in range(num_steps):
        train(model, optimizer, step)
    return model, optimizer


def fresh() -> Trained:
    torch.manual_seed(1)
    model = Model()
    return model, adamw(model)


def equal(one: Trained, other: Trained) -> bool:
    left, right = whole(*one), whole(*other)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_plain_script_needs_neither_ray_nor_what_comes_with_it(tmp_path: Path) -> None:
    """The import and all calls, with packages of the controller that cannot be imported."""
    others = ("ray", "aiohttp", "prometheus_client", "psutil", "transformers", "orchestrator")
    script = f"""
import sys
sys.modules |= dict.fromkeys({others!r})
import torch
from everstep import checkpoint
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint.async_save("ckpt", 1, model=model, optimizer=optimizer)
checkpoint.wait()
print(checkpoint.load("ckpt", model=model, optimizer=optimizer).step, checkpoint.newest("ckpt"))
"""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT}/workers/public"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=paths, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.stdout.split() == ["1", "ckpt/step-00000001"], done.stderr


def test_an_async_save_has_the_state_at_its_call(tmp_path: Path) -> None:
    """Training changes the same memory while it is written."""
    model, optimizer = trained()
    expected, trains_on = whole(model, optimizer), threading.Event()
    checkpoint._Saves.writer.submit(trains_on.wait)
    checkpoint.async_save(tmp_path, 2, model=model, optimizer=optimizer)
    train(model, optimizer, 9)
    trains_on.set()
    other = fresh()
    loaded = checkpoint.load(tmp_path, model=other[0], optimizer=other[1])

    assert loaded.step == 2
    assert all(torch.equal(one, expected[key]) for key, one in whole(*other).items())
    train(*other, 9)
    assert equal(other, (model, optimizer))


def test_a_write_begins_after_as_long_as_the_copy_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes of ranks that copied first slowed down the last one, for which all wait."""
    capture = HostBuffer.capture

    def late(buffer: HostBuffer, entries: Sequence[StateEntry]) -> Any:
        time.sleep(0.2)
        return capture(buffer, entries)

    monkeypatch.setattr(HostBuffer, "capture", late)
    model, optimizer = trained()
    checkpoint.async_save(tmp_path, 1, model=model, optimizer=optimizer)
    returned_s = time.monotonic()
    checkpoint.wait()

    assert time.monotonic() - returned_s >= 0.2


def test_a_failed_write_raises_at_the_next_call_and_can_be_repeated(tmp_path: Path) -> None:
    """A full disk: otherwise the script trains on for days without a checkpoint."""
    model, optimizer = trained()
    (tmp_path / "step-00000001").write_text("a file where a folder should be")
    checkpoint.async_save(tmp_path, 1, model=model, optimizer=optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=r"rank 0 has not saved step 1 to"):
        checkpoint.newest(tmp_path)
    (tmp_path / "step-00000001").unlink()
    checkpoint.async_save(tmp_path, 1, model=model, optimizer=optimizer)

    assert checkpoint.newest(tmp_path) == str(tmp_path / "step-00000001")


def test_a_damaged_byte_is_refused_with_tensor_and_file(tmp_path: Path) -> None:
    """A checkpoint that loads with one wrong bit trains on with it."""
    model, optimizer = trained()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    (path,) = tmp_path.glob("*/*.bin")
    data = bytearray(path.read_bytes())
    place = data.find(model.up.weight.detach().numpy().tobytes())
    assert place >= 0
    data[place + 5] ^= 4
    path.write_bytes(data)

    said = rf"rank 0 cannot load .*up\.weight \(weight\).*damaged.*{path.name}"
    with pytest.raises(checkpoint.CheckpointError, match=said):
        checkpoint.load(tmp_path, model=model, optimizer=optimizer)


def test_a_checkpoint_of_hugging_face_gives_weights(tmp_path: Path) -> None:
    """In bfloat16, with one of two tied names; it has no optimizer state."""
    model = build()
    tensors = {name: one.bfloat16() for name, one in model.state_dict().items()}
    del tensors["head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    other, optimizer = fresh()

    with pytest.raises(checkpoint.CheckpointError, match="load it without optimizer"):
        checkpoint.load(tmp_path, model=other, optimizer=optimizer)
    checkpoint.load(tmp_path, model=other)
    for name, one in other.named_parameters():
        assert torch.equal(one, tensors[name].float()), name
    del tensors["up.bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(checkpoint.CheckpointError, match=r"lacks up\.bias.*list in missing"):
        checkpoint.load(tmp_path, model=other)
    checkpoint.load(tmp_path, model=other, missing=["up.*"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_dcp_gives_weights_and_optimizer(tmp_path: Path) -> None:
    """A script that saved with DCP until now continues where it was."""
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path, no_dist=True)
    other = fresh()
    checkpoint.load(tmp_path, model=other[0], optimizer=other[1])

    found, expected = whole(*other), whole(model, optimizer)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_values_beside_the_model_come_back_as_they_were(tmp_path: Path) -> None:
    """JSON has no tuples, no keys but texts and no tensors."""
    model, optimizer = trained()
    values = {
        "epoch": 3,
        "best": (0.5, float("inf")),
        "random": torch.get_rng_state(),
        "by": {1: 2},
    }
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, 5)
    schedule.step()
    checkpoint.save(
        tmp_path, 1, model=model, optimizer=optimizer, extra={**values, "schedule": schedule}
    )
    other, moments = fresh()
    later = torch.optim.lr_scheduler.CosineAnnealingLR(moments, 10)
    extra = checkpoint.load(
        tmp_path, model=other, optimizer=moments, extra={"schedule": later}
    ).extra

    assert (extra["epoch"], extra["best"], extra["by"]) == (3, (0.5, float("inf")), {1: 2})
    assert torch.equal(extra["random"], values["random"])  # type: ignore[arg-type]
    assert later.state_dict() == schedule.state_dict()
    assert moments.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1
    assert moments.param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(checkpoint.CheckpointError, match="has no scaler in its extra"):
        checkpoint.load(tmp_path, model=other, extra={"scaler": later})
    with pytest.raises(checkpoint.CheckpointError, match=r"extra\['function'\] is a function"):
        checkpoint.save(tmp_path, 2, model=model, extra={"function": fresh})


def test_going_back_in_the_same_job_makes_later_versions_void(tmp_path: Path) -> None:
    """A loss spike: the script loads an older version, and saves the same steps once more."""
    model, optimizer = trained()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, **state)
    checkpoint.load(tmp_path / "step-00000001", **state)
    assert checkpoint.newest(tmp_path) == str(tmp_path / "step-00000003")
    train(model, optimizer, 7)
    checkpoint.save(tmp_path, 2, **state)

    assert checkpoint.newest(tmp_path) == str(tmp_path / "step-00000002")
    other = fresh()
    checkpoint.load(tmp_path, model=other[0], optimizer=other[1])
    assert equal(other, (model, optimizer))


def test_a_job_that_was_replaced_commits_nothing_more(tmp_path: Path) -> None:
    """A scheduler starts the next job while a process of the last one still hangs in its save."""
    model, optimizer = trained()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    store, folder = LocalStore(), str(tmp_path)
    later = {"token": "x", "host": "other", "since": "now", "resume": 1}
    claim(store, folder, next_claim(store, folder), later)

    with pytest.raises(checkpoint.CheckpointError, match=r"taken over: claim 2 .* on other"):
        checkpoint.save(tmp_path, 2, model=model, optimizer=optimizer)
    assert checkpoint.newest(tmp_path) == str(tmp_path / "step-00000001")


def test_a_step_that_is_saved_again_is_written_only_if_it_is_gone(tmp_path: Path) -> None:
    """A trainer saves the last step twice; a script deletes its folder and begins again."""
    model, optimizer = trained()
    for _ in range(2):
        checkpoint.save(tmp_path / "kept", 1, model=model, optimizer=optimizer)
        train(model, optimizer, 3)
    (path,) = (tmp_path / "kept").glob("*/*.bin")
    first = path.read_bytes()
    shutil.rmtree(tmp_path / "kept")
    checkpoint.save(tmp_path / "kept", 1, model=model, optimizer=optimizer)

    assert path.read_bytes() != first
    assert checkpoint.newest(tmp_path / "kept") == str(path.parent)


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Else the disk of a long job fills."""
    model, optimizer = trained()
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, model=model, optimizer=optimizer, keep=2)

    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000004",
        "step-00000005",
    ]


@pytest.mark.parametrize("made", [0, 2])
def test_an_optimizer_that_keeps_nothing_has_its_groups(tmp_path: Path, made: int) -> None:
    """No step was done, or it is plain SGD: no state is no mistake, and saving makes none."""
    model, optimizer = trained(made)
    plain = optimizer if made == 0 else torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint.save(tmp_path, 1, model=model, optimizer=plain)
    assert not plain.state
    other, moments = fresh()
    like = moments if made == 0 else torch.optim.SGD(other.parameters(), lr=1.0)
    train(other, moments, 1)
    checkpoint.load(tmp_path, model=other, optimizer=like)

    assert not like.state
    assert like.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(other.up.weight, model.up.weight)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would begin without its moments, and the loss would jump."""
    model, optimizer = trained()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    said = "exp_avg, exp_avg_sq, step, which SGD does not keep"
    with pytest.raises(checkpoint.CheckpointError, match=said):
        checkpoint.load(tmp_path, model=model, optimizer=momentum)


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    """A model that is compiled later, or no longer, is the same one."""
    model, optimizer = trained()
    inner: Any = torch.compile(model, backend="eager")
    compiled = nn.ModuleDict({"inner": inner})
    checkpoint.save(tmp_path, 1, model=compiled, optimizer=optimizer)

    held = ucp_core.open(str(tmp_path / "step-00000001"))
    names = {key.fqn for key in held.state_map.entries}
    assert names == {f"inner.{name}" for name in model.state_dict()} - {"inner.head.weight"}
    assert held.manifest.ties == {"inner.head.weight": "inner.embed.weight"}
    assert held.manifest.roles == {"inner.norm.bias": "frozen", "inner.seen": "buffer"}


class Odd(nn.Module):
    """Values of shapes and types that few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self) -> Tensor:
        return self.number * self.narrow.float().sum()


def test_odd_shapes_and_types_come_back(tmp_path: Path) -> None:
    """No dim, no element, another order of memory."""

    def made(value: float) -> tuple[Odd, torch.optim.AdamW]:
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=value)
        (model() * value).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = made(0.1)
    other = made(0.7)
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    checkpoint.load(tmp_path, model=other[0], optimizer=other[1])

    found, expected = whole(*other), whole(model, optimizer)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_processes_without_a_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun each would overwrite what the others save."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    model, optimizer = trained()
    with pytest.raises(checkpoint.CheckpointError, match=r"init_process_group\(\) first"):
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, alone=True)

    assert checkpoint.newest(tmp_path)


def test_a_load_collects_no_garbage(tmp_path: Path) -> None:
    """Visiting all objects of torch took six times as long as loading a small model."""

    class Observer:
        def state_dict(self) -> dict[str, bool]:
            return {}

        def load_state_dict(self, _state: dict[str, bool]) -> None:
            found.append(gc.isenabled())

    found: list[bool] = []
    gc.enable()  # tests of a controller in this process may have left it off
    model, optimizer = trained()
    mine = {"observer": Observer()}
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, extra=mine)

    checkpoint.load(tmp_path, model=model, optimizer=optimizer, extra=mine)

    assert [*found, gc.isenabled()] == [False, True]


def test_tensors_of_a_large_manifest_are_described_without_fragments(tmp_path: Path) -> None:
    """With 128 ranks, an eighth of the time of a load made fragments that it did not need."""
    model = nn.ModuleList(nn.Linear(2, 3) for _ in range(300))
    checkpoint.save(tmp_path, 1, model=model)

    state_map = ucp_core.open(str(tmp_path / "step-00000001")).state_map

    assert not any(hasattr(one, "fragments") for one in state_map.tensors.values())
    assert {key: (one.dtype, one.shape) for key, one in state_map.tensors.items()} == {
        key: (one.dtype, one.shape) for key, one in state_map.entries.items()
    }
