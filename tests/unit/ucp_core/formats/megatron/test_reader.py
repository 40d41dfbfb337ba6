"""Megatron-LM's older checkpoints: a folder per rank, masters by number or in flat buffers."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import assert_equal, loaded, read, tensor
from tests.support.megatron_folders import EMBEDDING, Megatron
from ucp_core.errors import CheckpointCorruptError, PatternError, UcpError, UnsupportedVersionError
from ucp_core.formats import recognise
from ucp_core.geometry import TensorKey
from ucp_core.language import load_rules
from ucp_core.storage import LocalStore


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_layout_is_whole_again(
    tmp_path: Path, tp: int, pp: int, *, distributed: bool
) -> None:
    """Each stage numbers its layers from 0, and no file says where flat masters begin."""
    made = Megatron(tp=tp, pp=pp, distributed=distributed)

    checkpoint = read(made.write(tmp_path))

    assert_equal(loaded(checkpoint), made.expected)
    assert checkpoint.step == 5
    assert len(checkpoint.param_groups) == 2
    assert "decoder.final_layernorm.weight" in checkpoint.param_groups[1]["params"]
    assert EMBEDDING in checkpoint.param_groups[0]["params"]
    assert TensorKey(EMBEDDING, "step") in checkpoint.state_map.entries
    assert checkpoint.manifest.ties == ({"output_layer.weight": EMBEDDING} if pp > 1 else {})
    assert recognise(LocalStore(), str(tmp_path)) == "megatron"


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_rows_behind_the_tokens_are_left_out_of_every_slot(
    tmp_path: Path, tp: int, pp: int, *, distributed: bool
) -> None:
    """The embedding, and the copy of it that the last stage has, were padded for these ranks."""
    made = Megatron(tp=tp, pp=pp, distributed=distributed)
    for name, tree in made.trees.items():
        if name.endswith("model_optim_rng.pt"):
            tree["args"].state.update(
                vocab_size=7, padded_vocab_size=8, make_vocab_size_divisible_by=8 // tp
            )

    checkpoint = read(made.write(tmp_path))

    assert_equal(
        loaded(checkpoint),
        {key: v[:7] if key[0] == EMBEDDING else v for key, v in made.expected.items()},
    )
    assert "7 of 8 rows" in checkpoint.manifest.items["vocabulary"].note


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rule_tells_where_the_padding_begins(tmp_path: Path, tp: int) -> None:
    """It counts before the arguments, and of one rank as of several."""
    made = Megatron(tp=tp)
    for tree in made.trees.values():
        tree["args"].state.update(padded_vocab_size=8)
    path = made.write(tmp_path)
    assert "keeps all 8 rows" in read(path).manifest.items["vocabulary"].note
    rule = "rules: [{match: '.*word_embeddings.weight', pattern: {cut: {dim: 0, unpadded: %d}}}]"

    checkpoint = read(path, rules=load_rules(rule % 5, "mine.yaml"))

    assert_equal(
        loaded(checkpoint),
        {key: v[:5] if key[0] == EMBEDDING else v for key, v in made.expected.items()},
    )
    with pytest.raises(PatternError, match="unpadded is 9"):
        read(path, rules=load_rules(rule % 9, "mine.yaml"))


FROZEN = (EMBEDDING, "mlp.linear_fc2.weight")


def _frozen(*, distributed: bool, norms: float | None = None) -> Megatron:
    """Return a checkpoint whose optimizer lacks some parameters; ``norms``: all norms' weights."""
    made = Megatron(distributed=distributed, frozen=FROZEN, norms=norms)
    for (name, slot), value in list(made.expected.items()):
        if name.endswith(FROZEN) and slot == "weight":
            made.expected[name, slot] = value.astype(np.float16)
        elif name.endswith(FROZEN):
            del made.expected[name, slot]
    return made


@pytest.mark.parametrize("distributed", [False, True])
def test_what_no_optimizer_has_was_frozen(tmp_path: Path, *, distributed: bool) -> None:
    """Flat buffers hold what is trained and nothing else, and say of neither what it is."""
    made = _frozen(distributed=distributed)

    checkpoint = read(made.write(tmp_path))

    assert_equal(loaded(checkpoint), made.expected)
    frozen = {name for name, _ in made.expected if name.endswith(FROZEN)}
    assert checkpoint.manifest.roles == dict.fromkeys(frozen, "frozen")
    assert frozen.isdisjoint(checkpoint.param_groups[0]["params"])


@pytest.mark.parametrize("distributed", [False, True])
def test_a_frozen_parameter_like_a_trained_one_is_no_guess(
    tmp_path: Path, *, distributed: bool
) -> None:
    """Norms begin as ones: the moments of the one would be taken for those of the other."""
    made = Megatron(distributed=distributed, frozen=("0.input_layernorm.weight",), norms=1.0)

    match = r"input_layernorm\.weight" if distributed else "in several ways"
    with pytest.raises(PatternError, match=match):
        read(made.write(tmp_path))


@pytest.mark.parametrize("distributed", [False, True])
def test_masters_of_another_save_are_refused(tmp_path: Path, *, distributed: bool) -> None:
    """They are known by the model's weights alone."""
    made = Megatron(distributed=distributed)
    model = made.trees["mp_rank_00/model_optim_rng.pt"]["model"]
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    model[name] = tensor(np.ones((20, 6), np.float16))

    with pytest.raises(PatternError, match=name if distributed else "mixes two saves"):
        read(made.write(tmp_path))


@pytest.mark.parametrize("file", ["mp_rank_01_000/model_optim_rng.pt",
                                  "mp_rank_00_001/distrib_optim.pt"])  # fmt: skip
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    """The arguments say how many ranks there were."""
    made = Megatron(tp=2, pp=2, distributed=True)
    path = made.write(tmp_path)
    (path / "iter_0000005" / file).unlink()
    if "model" in file:
        (path / "iter_0000005" / file).parent.joinpath("distrib_optim.pt").unlink()
        (path / "iter_0000005" / file).parent.rmdir()

    with pytest.raises(CheckpointCorruptError, match=file.split("/", maxsplit=1)[0]):
        read(path)


def _later(tree: dict[str, Any]) -> None:
    tree["iteration"] = 9


def _without_groups(tree: dict[str, Any]) -> None:
    tree["optimizer"] = {"optimizer": 3}


def _without_model(tree: dict[str, Any]) -> None:
    tree["model"] = {}


@pytest.mark.parametrize("spoil", [_later, _without_groups, _without_model])
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    """One clear error each."""
    made = Megatron(tp=2)
    spoil(made.trees["mp_rank_01/model_optim_rng.pt"])

    with pytest.raises(UcpError):
        read(made.write(tmp_path))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_experts_of_expert_parallel_ranks_have_their_numbers_in_the_model(
    tmp_path: Path, tp: int, pp: int, *, distributed: bool
) -> None:
    """Each rank counts its own from 0 on, and the first alone has the others' flat masters."""
    made = Megatron(tp=tp, pp=pp, ep=2, distributed=distributed)

    checkpoint = read(made.write(tmp_path))

    assert_equal(loaded(checkpoint), made.expected)
    assert [len(group["params"]) for group in checkpoint.param_groups] == [9, 3, 16]
    assert checkpoint.manifest.roles == {}


@pytest.mark.parametrize("distributed", [False, True])
def test_experts_of_a_switch_are_experts_too(tmp_path: Path, *, distributed: bool) -> None:
    """Megatron-core 0.4 and models from before it have no module around all of them."""
    made = Megatron(ep=2, expert="local_experts.{}", distributed=distributed)

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


def test_a_quick_geglu_is_a_gate_and_an_up_projection(tmp_path: Path) -> None:
    """The argument of later Megatrons: the halves of each rank would stay side by side."""
    made = Megatron(tp=2)
    for tree in made.trees.values():
        tree["args"].state.update(swiglu=False, quick_geglu=True)

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("expert", ["experts.local_experts.{}", ""], ids=["apart", "fused"])
def test_a_stage_without_experts_has_one_optimizer(
    tmp_path: Path, expert: str, *, distributed: bool
) -> None:
    """Where the first layers are dense; other expert parallel ranks save none of its buffers."""
    made = Megatron(tp=2, pp=2, ep=2, dense=1, expert=expert, distributed=distributed)

    checkpoint = read(made.write(tmp_path))

    assert_equal(loaded(checkpoint), made.expected)
    assert checkpoint.manifest.roles == {}


@pytest.mark.parametrize("place", ["000_000", "001_000", "001_001"])
def test_its_buffers_are_missed_where_they_should_be(tmp_path: Path, place: str) -> None:
    """From the first of the ranks that repeat it, and from all that have experts."""
    made = Megatron(pp=2, ep=2, dense=1, distributed=True)
    del made.trees[f"mp_rank_00_{place}/distrib_optim.pt"]

    with pytest.raises(CheckpointCorruptError, match=f"lacks mp_rank_00_{place}/distrib_optim"):
        read(made.write(tmp_path))


def _in_another_form(tree: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    tree["model"][name] = tensor(np.ones((2, 20, 6), np.float16))


def _as_one_optimizer(tree: dict[str, Any]) -> None:
    tree["optimizer"] = tree["optimizer"][:1]


def _one_expert_more(tree: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"
    tree["model"][name] = tensor(np.ones((20, 6), np.float16))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_in_another_form, "an unknown form"),
        (_as_one_optimizer, "chained optimizers"),
        (_one_expert_more, "is expert 2 of a rank"),
    ],
)
def test_experts_of_another_form_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], match: str
) -> None:
    """Ranks that count alike would be taken for one."""
    made = Megatron(ep=2)
    spoil(made.trees["mp_rank_00_001/model_optim_rng.pt"])

    with pytest.raises(UcpError, match=match):
        read(made.write(tmp_path))


def test_experts_cut_over_other_ranks_than_the_rest_are_refused(tmp_path: Path) -> None:
    """Names of folders count ranks of tensor parallelism, not those of the experts'."""
    made = Megatron(tp=2, ep=2)
    for tree in made.trees.values():
        tree["args"].state["expert_tensor_parallel_size"] = 1

    with pytest.raises(UnsupportedVersionError, match="cut over 1 ranks"):
        read(made.write(tmp_path))


def test_dicts_in_dicts_without_end_are_refused(tmp_path: Path) -> None:
    """The model's tensors are searched in all dicts below it, however deep."""
    made = Megatron(tp=1, pp=1)
    folder = made.write(tmp_path)
    (path,) = folder.rglob("model_optim_rng.pt")
    deep = b"X\x01\x00\x00\x00a" + b"}(X\x01\x00\x00\x00a" * 3000 + b"N" + b"u" * 3000
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            at = data.index(b"}", data.index(b"model")) + 1 if name.endswith("data.pkl") else 0
            more = b"(" + deep + b"u" if at else b""
            archive.writestr(name, data[:at] + more + data[at:])

    with pytest.raises(CheckpointCorruptError, match="recursion depth"):
        read(folder)
