"""Megatron-LM's older checkpoints: a folder per rank, masters by number or in flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    CLASSES,
    SLOTS,
    Array,
    assert_equal,
    loaded,
    namespace,
    read,
    tensor,
)
from ucp_core.converters import recognise
from ucp_core.converters.files.torch_writer import write_torch_file
from ucp_core.errors import CheckpointCorruptError, PatternError, UcpError, UnsupportedVersionError
from ucp_core.rules import load_rules
from ucp_core.statemap import TensorKey
from ucp_core.storage import LocalStore

LAYERS = 2
EXPERTS = 4
EMBEDDING = "embedding.word_embeddings.weight"


def _halves(whole: Array, tp: int) -> list[Array]:
    parts = [np.split(part, tp) for part in np.split(whole, 2)]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(tp)]


def _dim(dim: int) -> Callable[[Array, int], list[Array]]:
    return lambda whole, tp: np.split(whole, tp, axis=dim)


def _all(whole: Array, tp: int) -> list[Array]:
    return [whole] * tp


#: Names in a layer, their shapes, and how they are cut.
LAYER: dict[str, tuple[tuple[int, ...], Callable[[Array, int], list[Array]]]] = {
    "input_layernorm.weight": ((6,), _all),
    "self_attention.linear_qkv.weight": ((24, 6), _dim(0)),
    "self_attention.linear_proj.weight": ((6, 8), _dim(1)),
    "mlp.linear_fc1.weight": ((20, 6), _halves),
    "mlp.linear_fc2.weight": ((6, 10), _dim(1)),
}


def _value(name: str, slot: str, shape: tuple[int, ...]) -> Array:
    values = np.random.default_rng([*f"{name}/{slot}".encode()]).standard_normal(shape)
    return np.asarray(values, np.float32)


class Megatron:
    """A checkpoint before it is written: trees by file."""

    def __init__(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        distributed: bool = False,
        frozen: tuple[str, ...] = (),
        norms: float | None = None,
        ep: int = 1,
    ) -> None:
        self.trees: dict[str, Any] = {}
        self._frozen, self._norms, self._ep = frozen, norms, ep
        self.expected: dict[tuple[str, str], Array] = {}
        self._tp, self._pp = tp, pp
        for stage in range(pp):
            for rank in range(tp):
                for expert_rank in range(ep):
                    self._add(stage, rank, expert_rank, distributed=distributed)

    def _params(self, stage: int, expert_rank: int) -> list[tuple[str, str, tuple[int, ...], Any]]:
        """Return the local name, the name in the model, the shape and the cut of each."""
        found: list[tuple[str, str, tuple[int, ...], Any]] = []
        if stage == 0:
            found.append((EMBEDDING, EMBEDDING, (8, 6), _dim(0)))
        count = LAYERS // self._pp
        for layer in range(count):
            for name, (shape, cut) in LAYER.items():
                number = stage * count + layer
                local, whole = (f"decoder.layers.{n}.{name}" for n in (layer, number))
                found.append((local, whole, shape, cut))
            for expert in range(EXPERTS // self._ep if self._ep > 1 else 0):
                own = expert_rank * (EXPERTS // self._ep) + expert
                for name in ("linear_fc1.weight", "linear_fc2.weight"):
                    local = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}"
                    whole = f"decoder.layers.{number}.mlp.experts.local_experts.{own}.{name}"
                    found.append((local, whole, *LAYER[f"mlp.{name}"]))
        if stage == self._pp - 1:
            norm = "decoder.final_layernorm.weight"
            found.append((norm, norm, (6,), _all))
            if self._pp > 1:
                found.append(("output_layer.weight", EMBEDDING, (8, 6), _dim(0)))
        return found

    def _add(self, stage: int, rank: int, expert_rank: int, *, distributed: bool) -> None:
        params = self._params(stage, expert_rank)
        model: dict[str, Any] = {}
        shards: dict[tuple[str, str], Array] = {}
        for local, whole, shape, cut in params:
            for slot in ("weight", *SLOTS):
                value = _value(whole, slot, shape)
                if slot == "weight" and "norm" in whole and self._norms is not None:
                    value = np.full(shape, self._norms, np.float32)
                self.expected[whole, slot] = value
                shards[local, slot] = cut(value, self._tp)[rank]
            model[local] = tensor(shards[local, "weight"].astype(np.float16))
        model["decoder.layers.0.mlp._extra_state"] = None
        params = [param for param in params if not param[1].endswith(self._frozen)]
        folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self._pp > 1 else "")
        folder += f"_{expert_rank:03d}" if self._ep > 1 else ""
        optimizers, flats = [], []
        for experts in (False, True) if self._ep > 1 else (False,):
            own = [param for param in params if (".experts." in param[0]) == experts]
            hyper = [
                {"lr": 0.1, "wd_mult": wd, "step": 5, "is_expert_parallel": experts}
                for wd in ((1.0,) if experts else (1.0, 0.0))
            ]
            groups = [[p[0] for p in own if (len(p[2]) > 1) == bool(g["wd_mult"])] for g in hyper]
            if distributed:
                optimizers.append({"optimizer": {"param_groups": hyper}})
                # The first of the ranks that repeat a parameter gathers its state.
                flats.append(self._flat(own, shards) if experts or expert_rank == 0 else None)
            else:
                optimizers.append(_numbered(groups, hyper, shards))
        optimizer = optimizers[0] if self._ep == 1 else optimizers
        if distributed:
            self.trees[f"{folder}/distrib_optim.pt"] = flats[0] if self._ep == 1 else flats
        self.trees[f"{folder}/model_optim_rng.pt"] = {
            "args": namespace(
                tensor_model_parallel_size=self._tp,
                pipeline_model_parallel_size=self._pp,
                num_layers=LAYERS,
                swiglu=True,
                **(
                    {"expert_model_parallel_size": self._ep, "num_experts": EXPERTS}
                    if self._ep > 1
                    else {}
                ),
            ),
            "checkpoint_version": 3.0,
            "iteration": 5,
            "model": model,
            "optimizer": optimizer,
            "opt_param_scheduler": {"num_steps": 5},
            "rng_state": [1],
        }

    def _flat(self, params: Any, shards: Any) -> dict[Any, Any]:
        """Return a buffer of two buckets: reversed, aligned, unpadded at the end of each."""
        parts: dict[str, list[Array]] = {slot: [] for slot in ("weight", *SLOTS)}
        end = bucket = 0
        for index, (local, _, _, _) in enumerate(reversed(params)):
            if index == len(params) // 2:
                bucket = end
            start = bucket + -(-(end - bucket) // 64) * 64
            for slot, arrays in parts.items():
                arrays += [np.zeros(start - end, np.float32), shards[local, slot].ravel()]
            end = start + shards[local, "weight"].size
        flat = {slot: tensor(np.concatenate(arrays)) for slot, arrays in parts.items()}
        flat["param"] = flat.pop("weight")
        return {"buckets_coalesced": True, 0: {"torch.float16": {**flat, "numel_unpadded": end}}}

    def write(self, path: Path) -> Path:
        for name, tree in self.trees.items():
            (path / "iter_0000005" / name).parent.mkdir(parents=True, exist_ok=True)
            file = str(path / "iter_0000005" / name)
            write_torch_file(LocalStore(), file, tree, allow=CLASSES, fsync=False)
        (path / "latest_checkpointed_iteration.txt").write_text("5")
        return path


def _numbered(names: list[list[str]], hyper: list[dict[str, Any]], shards: Any) -> dict[str, Any]:
    order = [name for group in names for name in group]
    state = {
        number: {slot: tensor(shards[name, slot]) for slot in SLOTS}
        for number, name in enumerate(order)
    }
    groups = [
        {**values, "params": [order.index(name) for name in group]}
        for values, group in zip(hyper, names, strict=True)
    ]
    masters = [[tensor(shards[name, "weight"]) for name in group] for group in names]
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": masters,
    }


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_layout_is_whole_again(
    tmp_path: Path, tp: int, pp: int, *, distributed: bool
) -> None:
    """Layers are numbered anew in each stage, and no file says where flat masters begin."""
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

    with pytest.raises(PatternError, match=r"input_layernorm\.weight"):
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


def _more_layers(tree: dict[str, Any]) -> None:
    tree["model"]["decoder.layers.7.input_layernorm.weight"] = tensor(np.ones(6, np.float16))


def _ancient(tree: dict[str, Any]) -> None:
    tree["checkpoint_version"] = 0


@pytest.mark.parametrize("spoil", [_later, _without_groups, _without_model, _more_layers, _ancient])
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


def _as_one_parameter(tree: dict[str, Any]) -> None:
    tree["model"]["decoder.layers.0.mlp.experts.weight1"] = tensor(np.ones((6, 40), np.float16))


def _as_one_optimizer(tree: dict[str, Any]) -> None:
    tree["optimizer"] = tree["optimizer"][:1]


def _one_expert_more(tree: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"
    tree["model"][name] = tensor(np.ones((20, 6), np.float16))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_as_one_parameter, "in one parameter"),
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
