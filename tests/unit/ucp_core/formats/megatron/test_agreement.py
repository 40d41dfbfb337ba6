"""Files of Megatron's older checkpoints that are of several saves, or of other ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import assert_equal, loaded, read, tensor
from tests.support.megatron_folders import Megatron
from ucp_core.errors import CheckpointCorruptError, StorageError

LAYOUTS = [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"ep": 2, "expert": ""}, {"tp": 2, "pp": 2, "ep": 2}]


def _models(made: Megatron) -> list[str]:
    """Return the model files in the order of the processes that write them."""

    def place(name: str) -> tuple[int, ...]:
        tp, *rest = map(int, name.split("/", maxsplit=1)[0].removeprefix("mp_rank_").split("_"))
        return (*rest, tp)

    return sorted((n for n in made.trees if n.endswith("model_optim_rng.pt")), key=place)


def _saved(path: Path, layout: dict[str, Any], *, distributed: bool = False) -> tuple[Path, Any]:
    """Return a checkpoint of several processes, of which each has two replicas, and its files."""
    made = Megatron(distributed=distributed, **layout)
    models = _models(made)
    for number, name in enumerate(models):
        made.trees[name]["args"].state["rank"] = 2 * number
    return made.write(path) / "iter_0000005", (made, models)


def _id(layout: dict[str, Any]) -> str:
    return " ".join(f"{name}{value}" for name, value in layout.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
def test_files_of_processes_in_order_are_read(tmp_path: Path, layout: dict[str, Any]) -> None:
    """By stage, expert parallel and tensor parallel rank, whatever the names' order is."""
    path, (made, _) = _saved(tmp_path, layout)

    assert_equal(loaded(read(path.parent)), made.expected)


def test_stages_can_be_numbered_after_experts(tmp_path: Path) -> None:
    """As they are by one of Megatron's options."""
    made = Megatron(pp=2, ep=2)
    names = (f"mp_rank_00_{p:03d}_{e:03d}/model_optim_rng.pt" for e in (0, 1) for p in (0, 1))
    for number, name in enumerate(names):
        made.trees[name]["args"].state["rank"] = number

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


def test_files_that_one_process_wrote_are_read(tmp_path: Path) -> None:
    """As tools do that cut a model for other ranks."""
    made = Megatron(tp=2)
    for tree in made.trees.values():
        tree["args"].state["rank"] = 0

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
@pytest.mark.parametrize("distributed", [False, True])
def test_folders_that_changed_places_are_refused(
    tmp_path: Path, layout: dict[str, Any], *, distributed: bool
) -> None:
    """Every shape fits, and nothing else in a file says whose it is."""
    path, (_, models) = _saved(tmp_path, layout, distributed=distributed)
    one, other = (path / models[n].split("/")[0] for n in (0, -1))
    one.rename(path / "aside")
    other.rename(one)
    (path / "aside").rename(other)

    with pytest.raises(CheckpointCorruptError, match=r"written by process \d+.*changed places"):
        read(path.parent)


def test_a_file_that_was_copied_over_another_is_refused(tmp_path: Path) -> None:
    """It would be half of each tensor, twice."""
    path, (_, models) = _saved(tmp_path, {"tp": 2, "pp": 2})
    shutil.copy(path / models[1], path / models[2])

    with pytest.raises(CheckpointCorruptError, match=r"mp_rank_00_001.*copied over"):
        read(path.parent)


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_file_without_the_optimizer_that_others_have_is_refused(
    tmp_path: Path, layout: dict[str, Any], *, distributed: bool
) -> None:
    """The experts of that rank would be read without masters and moments."""
    made = Megatron(distributed=distributed, **layout)
    name = _models(made)[-1]
    del made.trees[name]["optimizer"]

    with pytest.raises(CheckpointCorruptError, match=f"{name} has no optimizer"):
        read(made.write(tmp_path))


def test_arguments_of_another_model_are_refused(tmp_path: Path) -> None:
    """Those of the first file count for all."""
    made = Megatron(ep=2)
    made.trees[_models(made)[-1]]["args"].state["num_experts"] = 8

    with pytest.raises(CheckpointCorruptError, match=r"mp_rank_00_001.*args\.num_experts 8.* 4"):
        read(made.write(tmp_path))


def test_buffers_that_no_rank_has_any_more_are_asked_for(tmp_path: Path) -> None:
    """Without them the optimizer has no state, and its groups no parameters."""
    made = Megatron(tp=2, distributed=True)
    for name in [name for name in made.trees if name.endswith("distrib_optim.pt")]:
        del made.trees[name]

    with pytest.raises(CheckpointCorruptError, match=r"\(distrib_optim\.pt\), which no folder"):
        read(made.write(tmp_path))


def test_the_missing_file_of_the_first_rank_is_named(tmp_path: Path) -> None:
    """The format was not recognised."""
    path, (_, models) = _saved(tmp_path, {"tp": 2})
    (path / models[0]).unlink()

    with pytest.raises(StorageError, match="mp_rank_00/model_optim_rng"):
        read(path.parent)


def _copied(made: Megatron, one: str, other: str) -> None:
    """Give a rank all files of another."""
    source, target = (name.split("/")[0] for name in (one, other))
    for name in [name for name in made.trees if name.startswith(f"{target}/")]:
        made.trees[name] = made.trees[name.replace(target, source)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
@pytest.mark.parametrize("distributed", [False, True])
def test_moments_that_two_ranks_have_are_of_one_file(
    tmp_path: Path, layout: dict[str, Any], *, distributed: bool
) -> None:
    """Also where nothing says which process wrote it, as in files of other tools."""
    made = Megatron(distributed=distributed, **layout)
    models = _models(made)
    # The first expert parallel rank has state of the rest, too, in the same file.
    _copied(made, models[-2], models[-1])

    with pytest.raises(CheckpointCorruptError, match=r"holds the same moments.*copied over"):
        read(made.write(tmp_path))


def test_moments_that_are_all_alike_are_of_any_file(tmp_path: Path) -> None:
    """As those of a run are that has made no step yet."""
    made = Megatron(ep=2)
    models = _models(made)
    _copied(made, models[0], models[-1])
    for optimizer in made.trees[models[0]]["optimizer"]:
        for state in optimizer["optimizer"]["state"].values():
            for slot, value in state.items():
                state[slot] = tensor(np.zeros(value.shape, np.float32))

    assert len(loaded(read(made.write(tmp_path)))) == len(made.expected)


@pytest.mark.parametrize("distributed", [False, True])
def test_what_all_ranks_have_is_no_copy(tmp_path: Path, *, distributed: bool) -> None:
    """Norms alone are trained: ranks that cut the rest have the same moments of them."""
    rest = ("embeddings.weight", "proj.weight", "qkv.weight", "fc1.weight", "fc2.weight")
    made = Megatron(tp=2, distributed=distributed, frozen=rest)

    assert {key[0] for key in loaded(read(made.write(tmp_path))) if key[1] == "exp_avg"} == {
        name for name, _ in made.expected if "norm" in name
    }


def test_a_parameter_that_is_numbered_twice_is_refused(tmp_path: Path) -> None:
    """It would have given its moments to another one."""
    made = Megatron()
    tree = made.trees["mp_rank_00/model_optim_rng.pt"]["optimizer"]["optimizer"]
    tree["param_groups"][0]["params"][1] = tree["param_groups"][0]["params"][0]

    with pytest.raises(CheckpointCorruptError, match="parameter 0 more than once"):
        read(made.write(tmp_path))
