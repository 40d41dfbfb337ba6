"""Checkpoints that DeepSpeed made, read and written in their own layout: the same files again."""

from typing import Any

import pytest
import torch

from tests.support.foreign_reading import checkpoint_fixture
from tests.support.torch_files import load_torch_file
from ucp_core.formats import open_source
from ucp_core.formats.deepspeed.writer import write
from ucp_core.language import Cut, Replicated, Rules
from ucp_core.language.rules import Rule
from ucp_core.storage import LocalStore, MemoryStore

#: Keys that no reader of the files needs, or that have their own tests.
LEFT_OUT = {"param_alignment_paddings", "universal_checkpoint_info", "tensor_parallel"}
AUTO_TP = Rules(
    (
        Rule(r".*\.(q|k|v|gate|up)_proj\.weight", Cut(0)),
        Rule(r".*\.(o|down)_proj\.weight", Cut(1)),
        Rule(r".*(norm|embed_tokens|lm_head)\.weight", Replicated()),
    )
)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("ds_zero1_dp2", {"stage": 1, "dp": 2}),
        ("ds_zero1_dp2_tied", {"stage": 1, "dp": 2}),
        ("ds_zero3_dp2", {"stage": 3, "dp": 2}),
        (
            "ds_pp2_dp2_zero1",
            {"stage": 1, "dp": 2, "stages": (0, 2), "tied_layers": {"embed": (0, 4)}},
        ),
        ("ds_tp2_dp2_zero1", {"stage": 1, "dp": 2, "tp": 2, "rules": AUTO_TP}),
    ],
)
def test_the_files_that_deepspeed_wrote_come_out_again(name: str, target: dict[str, Any]) -> None:
    """Every key, shape, dtype, name, order of names and bit of every tensor."""
    made = checkpoint_fixture(name) / "checkpoint"
    tag = (made / "latest").read_text()
    source = open_source(LocalStore(), str(made))
    store = MemoryStore()

    write(source, store, "out", memory_bytes=32 << 20, **target)

    assert store.read("out/latest").decode() == tag
    assert list(store.list(f"out/{tag}")) == sorted(path.name for path in (made / tag).iterdir())
    for file in store.list(f"out/{tag}"):
        expected = load_torch_file((made / tag / file).read_bytes())
        _assert_same(expected, load_torch_file(store.read(f"out/{tag}/{file}")), file)


def test_the_geometry_of_tensor_parallelism_comes_out_again() -> None:
    """DeepSpeed's own converter goes by it, and is silently wrong without it."""
    made = checkpoint_fixture("ds_tp2_dp2_zero1") / "checkpoint"
    file = "global_step4/mp_rank_01_model_states.pt"
    store = MemoryStore()

    write(
        open_source(LocalStore(), str(made)),
        store,
        "out",
        memory_bytes=32 << 20,
        dp=2,
        tp=2,
        rules=AUTO_TP,
    )

    key = "universal_checkpoint_info"
    expected = load_torch_file((made / file).read_bytes())[key]
    found = load_torch_file(store.read(f"out/{file}"))[key]
    assert found["affine_map"] == expected["affine_map"]
    for kind in ("tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"):
        assert sorted(found[kind]) == expected[kind]


def _assert_same(expected: Any, found: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert set(found) - LEFT_OUT == set(expected) - LEFT_OUT, where
        if where.endswith((".param_slice_mappings[0]", ".param_shapes[0]")):
            assert list(found) == list(expected), where
        for key in set(expected) - LEFT_OUT:
            _assert_same(expected[key], found[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, two) in enumerate(zip(expected, found, strict=True)):
            _assert_same(one, two, f"{where}[{index}]")
    elif type(expected).__module__ == "tests.support.torch_files":
        assert type(found).__name__ == type(expected).__name__, where
        assert vars(found) == vars(expected), where
    else:
        assert (type(found), found) == (type(expected), expected), where
