"""``ucp export --format deepspeed``: the target's layout from the command line."""

from pathlib import Path

import pytest

from tests.support.commands import ucp
from tests.support.training_states import adam_state
from ucp_core.storage import LocalStore


@pytest.fixture
def source(tmp_path: Path) -> str:
    directory = tmp_path / "source"
    adam_state({"tied_modules.embed.w": (3, 2), "1.w": (4, 2), "2.w": (5,)}).save(
        LocalStore(), str(directory)
    )
    return str(directory)


def test_a_pipeline_needs_its_stages_and_tied_layers(source: str, tmp_path: Path) -> None:
    """Lists have to come through a command line that has none."""
    target = ("--stage", "1", "--dp", "2", "--stages", "0,2", "--tied", "embed=0,3")

    done = ucp("export", source, str(tmp_path / "out"), "--format", "deepspeed", *target)

    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out" / "global_step7"
    assert sorted(path.name for path in folder.glob("layer_*")) == [
        f"layer_0{layer}-model_states.pt" for layer in range(3)
    ]
    assert len(list(folder.glob("zero_pp_rank_1_mp_rank_01_optim_states.pt"))) == 1


@pytest.mark.parametrize(
    "target",
    [("--stages", "0,x"), ("--stages", ""), ("--stages", "0", "--tied", "embed")],
    ids=["letter", "empty", "no-layers"],
)
def test_a_list_that_is_none_is_a_mistake_of_usage(
    source: str, tmp_path: Path, target: tuple[str, ...]
) -> None:
    """A traceback of int() would not say which option."""
    done = ucp("export", source, str(tmp_path / "out"), "--format", "deepspeed", *target)

    assert done.returncode == 2
    assert target[-2] in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal"])
def test_weights_alone_are_refused_with_what_works(source: str, tmp_path: Path, to: str) -> None:
    """The default stage needs an optimizer; without one, the error says what to give."""
    weights, out = str(tmp_path / "hf"), tmp_path / "out"
    ucp("export", source, weights, "--format", "huggingface")

    refused = ucp("export", weights, str(out), "--format", to)

    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "--stage 0" in refused.stderr
    assert not out.exists()
    done = ucp("export", weights, str(out), "--format", "deepspeed", "--stage", "0")
    assert done.returncode == 0, done.stderr
    assert ucp("diff", weights, str(out), "--slots", "weight").returncode == 0
