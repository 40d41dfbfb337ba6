"""``everstep.checkpoint`` in a script of several ranks, as a reader of the guide runs it.

Two ranks run it under torchrun. Others are forked: each would import torch for seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ucp_core
from everstep import checkpoint
from tests.arch.tree import ROOT
from tests.support.foreign_reading import loaded
from tests.support.ranks import Place, running
from tests.support.train_checkpointed import adamw, build, save, whole
from ucp_core.geometry import TensorKey

SCRIPT = ROOT / "tests/support/train_checkpointed.py"


def torchrun(num_ranks: int, *arguments: str) -> tuple[int, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "workers/public")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(num_ranks), str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def one_of_four(place: Place) -> None:
    """Save; one rank is killed the last time, and all others end with an error."""
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=4)
    save(place.directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks save, the last time only in part; then two ranks load and save."""
    made = tmp_path_factory.mktemp("torchrun")
    with running(one_of_four, 4, made) as ranks, pytest.raises(AssertionError, match="raised"):
        ranks.results()
    assert len([*made.glob("*.saved")]) == 4
    assert checkpoint.newest(made / "main") == str(made / "main/step-00000002")
    status, printed = torchrun(2, "load", str(made))
    assert not status, printed
    return made


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "loaded.json").read_text())
    return found


def test_a_job_that_is_killed_in_a_save_leaves_the_version_before(folder: Path) -> None:
    """Three of four parts were written: a reader must not see them, and the next job goes on."""
    assert told(folder)["step"] == 2
    assert told(folder)["newest"].endswith("step-00000003")
    names = {path.name for path in (folder / "main/step-00000003").iterdir()}
    assert {"a0001-r00000.json", "a0002-r00000.json", "manifest.json"} <= names
    assert ucp_core.open(str(folder / "main/step-00000003")).attempt == 2


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_two_ranks_load_every_bit_that_four_saved(folder: Path, layout: str) -> None:
    """The save went on beside the next step, which changed all tensors."""
    assert told(folder)[layout] is True


def test_groups_of_the_optimizer_schedulers_and_values_of_each_rank_come_back(
    folder: Path,
) -> None:
    """Only one rank's values would be lost without a word if records kept those of rank 0."""
    found = told(folder)
    assert (found["lr"], found["decay"]) == ([0.025, 0.025], [0.01, 0.0])
    assert found["schedule"] == 2
    assert found["extra"]["by_rank"] == {f"rank {rank}": rank for rank in range(4)}
    assert found["extra"]["who"] == 0


@pytest.mark.parametrize("name", ["main", "tensor"])
def test_one_process_loads_what_ranks_saved(folder: Path, name: str) -> None:
    """A model is trained on many ranks and looked at on one."""
    path = folder / name / ("step-00000002" if name == "main" else "step-00000001")
    model = build()
    optimizer = adamw(model)
    checkpoint.load(path, model=model, optimizer=optimizer)

    expected, found = torch.load(folder / "expected.pt"), whole(model, optimizer)
    assert found.keys() == expected.keys()
    assert [key for key, one in expected.items() if not torch.equal(found[key], one)] == []


def test_ranks_with_the_same_model_share_the_writing(folder: Path) -> None:
    """Four copies would take four times the bytes, unnoticed until the disk is full."""
    model = build()
    optimizer = adamw(model)
    checkpoint.load(folder / "copies", model=model, optimizer=optimizer)
    expected, found = torch.load(folder / "copies.pt"), whole(model, optimizer)

    assert [key for key, one in expected.items() if not torch.equal(found[key], one)] == []
    for name in ("copies", "hybrid"):
        held = ucp_core.open(str(folder / name / "step-00000001")).state_map
        files = [*(folder / name / "step-00000001").glob("*.bin")]
        sizes = [path.stat().st_size for path in files]
        assert sum(sizes) <= held.num_bytes + 4 * 12, name  # the buffer
        assert min(sizes) > max(sizes) / 2, sizes


def test_stages_that_know_nothing_of_each_other_are_one_checkpoint(folder: Path) -> None:
    """Two ranks wrote each of their tensors; one of both counts."""
    held = ucp_core.open(str(folder / "stages/step-00000001"))
    model = build()

    assert {key.fqn for key in held.state_map.entries} == {
        "up.weight", "up.bias", "down.weight", "down.bias",
    }  # fmt: skip
    for name in ("up.weight", "down.weight"):
        assert torch.equal(loaded(held, name, "weight"), model.state_dict()[name])
    assert len(held.state_map.entries[TensorKey("up.bias", "weight")].fragments) == 1
