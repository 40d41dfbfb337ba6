"""Megatron's older checkpoints: files of several saves, and files that are missing."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.deepspeed_folders import read
from tests.support.megatron_folders import Megatron
from ucp_core.errors import CheckpointCorruptError, StorageError

LAYOUTS = [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"ep": 2, "expert": ""}, {"tp": 2, "pp": 2, "ep": 2}]


def _models(made: Megatron) -> list[str]:
    """Return the model files in the order of the processes that write them."""

    def place(name: str) -> tuple[int, ...]:
        tp, *rest = map(int, name.split("/", maxsplit=1)[0].removeprefix("mp_rank_").split("_"))
        return (*rest, tp)

    return sorted((n for n in made.trees if n.endswith("model_optim_rng.pt")), key=place)


def _id(layout: dict[str, Any]) -> str:
    return " ".join(f"{name}{value}" for name, value in layout.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_file_without_the_optimizer_that_others_have_is_refused(
    tmp_path: Path, layout: dict[str, Any], *, distributed: bool
) -> None:
    """The experts of that rank would be read without masters and moments."""
    made = Megatron(distributed=distributed, **layout)
    name = _models(made)[-1]
    del made.trees[name]["optimizer"]

    with pytest.raises(CheckpointCorruptError, match=f"{name}: its iteration or optimizer"):
        read(made.write(tmp_path))


def test_buffers_that_no_rank_has_are_refused(tmp_path: Path) -> None:
    """Without them the optimizer has no state, and its groups no parameters."""
    made = Megatron(tp=2, distributed=True)
    for name in [name for name in made.trees if name.endswith("distrib_optim.pt")]:
        del made.trees[name]

    with pytest.raises(CheckpointCorruptError, match=r"lacks distrib_optim\.pt"):
        read(made.write(tmp_path))


def test_the_missing_file_of_the_first_rank_is_named(tmp_path: Path) -> None:
    """The format was not recognised."""
    path = Megatron(tp=2).write(tmp_path) / "iter_0000005"
    (path / "mp_rank_00/model_optim_rng.pt").unlink()

    with pytest.raises(StorageError, match="mp_rank_00/model_optim_rng"):
        read(path.parent)
