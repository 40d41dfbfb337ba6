"""Megatron-core's checkpoints open layer by layer; flat buffers are told apart by proof."""

import io
import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import megatron_files
from tests.support.dcp_files import Chunk, Save, write
from tests.support.foreign_reading import checkpoint_fixture, loaded, unequal
from tests.support.megatron_files import expected, state, write_checkpoint
from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    PatternError,
    UnsupportedVersionError,
)
from ucp_core.formats import open_source
from ucp_core.formats.megatron_core import reader as megatron_core
from ucp_core.formats.megatron_core.recognition import recognise
from ucp_core.geometry import TensorKey
from ucp_core.language import load_rules
from ucp_core.native import Checkpoint
from ucp_core.storage import LocalStore, MemoryStore


def _opened(values: Any, **options: Any) -> Checkpoint:
    store = MemoryStore()
    write_checkpoint(store, "c", values, **options)
    return megatron_core.read(store, "c")


@pytest.mark.parametrize("name", ["megatron_core_tp2"])
def test_what_megatron_saved_is_read_bit_for_bit(name: str) -> None:
    """Made by megatron-core itself; tensors were gathered in its processes, not from files."""
    folder = checkpoint_fixture(name)
    checkpoint = open_source(LocalStore(), str(folder / "checkpoint"))
    assert checkpoint.manifest.source["format"] == "megatron-core"
    assert unequal(checkpoint, load_file(folder / "expected.safetensors")) == []
    assert checkpoint.step == 4
    groups = checkpoint.param_groups
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    assert "decoder.layers.1.input_layernorm.weight" in groups[1]["params"]
    assert "embedding.word_embeddings.weight" in groups[0]["params"]


@pytest.mark.parametrize("buffers", [False, True], ids=["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_every_layout_of_the_optimizer_is_read(tp: int, pp: int, *, buffers: bool) -> None:
    """Stacked layers, gated halves, what only one rank saved, padding between parameters."""
    values = state()
    checkpoint = _opened(values, tp=tp, pp=pp, buffers=buffers)
    assert unequal(checkpoint, expected(values, local=True)) == []
    entries = checkpoint.state_map.entries
    assert {entry.dtype for entry in entries.values()} == {"F32"}
    assert checkpoint.manifest.items["model"].policy == "drop"
    assert checkpoint.manifest.roles == {}
    assert loaded(checkpoint, "output_layer.weight", "step") == 4.0


def test_what_only_transformer_engine_has_tells_its_names_from_the_local_ones() -> None:
    """Both kinds of modules are saved under one set of names; only their own states differ."""
    values = state()
    checkpoint = _opened(values, local=False)
    assert unequal(checkpoint, expected(values, local=False)) == []
    assert checkpoint.manifest.items["_extra_state"].policy == "replicate"
    assert len(checkpoint.extra["_extra_state"]) == 2


def test_a_module_s_own_state_that_is_too_large_to_keep_is_left_out_by_name() -> None:
    """Histories of fp8 that are longer than usual; no weight was to be had for them before."""
    values = state()
    shard = "decoder.layers.mlp.linear_fc2._extra_state/shard_0_1"
    large = torch.zeros(70_000, dtype=torch.uint8)
    checkpoint = _opened(values, local=False, objects={shard: [large], f"{shard}0": [io.BytesIO()]})
    assert unequal(checkpoint, expected(values, local=False)) == []
    assert checkpoint.manifest.items[shard].policy == "drop"
    assert len(checkpoint.extra["_extra_state"]) == 3


def test_newer_megatron_keeps_the_common_state_among_the_items() -> None:
    """Version 0.19 no longer has ``common.pt``."""
    values = state()
    checkpoint = _opened(values, common_file=False)
    assert unequal(checkpoint, expected(values, local=True)) == []
    assert (checkpoint.step, checkpoint.extra["checkpoint_version"]) == (4, 3.0)


def test_equal_weights_do_not_swap_moments() -> None:
    """Norms begin as ones, all alike: only the order tells them apart then, or nothing."""
    values = state()
    for key, tensor in values["param"].items():
        if "norm" in key:
            tensor.fill_(1.0)
    checkpoint = _opened(values, buffers=True)
    assert unequal(checkpoint, expected(values, local=True)) == []
    mixed = {slot: dict(sorted(tensors.items())) for slot, tensors in values.items()}
    with pytest.raises(UnsupportedVersionError, match="fully-reshardable"):
        _opened(mixed, buffers=True)


@pytest.mark.parametrize("is_step_common", [False, True])
def test_ranks_with_one_and_with_many_tensors_of_a_bucket(*, is_step_common: bool) -> None:
    """The first rank has a part of the output layer only, and others most of a layer.

    With Adam on the CPU, some forks leave a list in the common state that is as long as rank 0's
    tensors; Megatron merges it with the lists of other ranks, which are longer, and fails.
    """
    values = state()
    kept = {"param_state": {0: {(torch.bfloat16, torch.float32): [[{"step": torch.tensor(4.0)}]]}}}
    optimizer = {"param_state_sharding_type": "dp_reshardable"} | (kept if is_step_common else {})
    checkpoint = _opened(values, tp=1, dp=8, buffers=True, optimizer=optimizer)

    held = defaultdict(set)
    for key, entry in checkpoint.state_map.entries.items():
        for fragment in entry.fragments if key.slot == "exp_avg" else ():
            held[fragment.file].add(key.fqn)
    counts = sorted(len(names) for names in held.values())
    assert (len(counts), counts[0]) == (8, 1)
    assert counts[-1] > 3
    assert unequal(checkpoint, expected(values, local=True)) == []
    assert loaded(checkpoint, "output_layer.weight", "step") == 4.0


def test_a_group_without_a_step_has_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine leaves it empty in a group; its moments were corrected as those of 0."""
    decayed, plain = megatron_files.GROUPS
    monkeypatch.setattr(megatron_files, "GROUPS", [{**decayed, "step": None}, plain])
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert loaded(_opened(state()), name, "step") == 4.0


def test_values_tell_what_the_order_of_keys_does_not() -> None:
    """Ranks that share the saving write keys in another order than that of the modules."""
    values = {slot: dict(sorted(tensors.items())) for slot, tensors in state().items()}
    checkpoint = _opened(values, buffers=True)
    assert unequal(checkpoint, expected(values, local=True)) == []


def test_buffers_that_do_not_fit_the_weights_are_refused() -> None:
    """A wrong guess would give a model that trains, with the moments of other parameters."""
    values = state()
    store = MemoryStore()
    write_checkpoint(store, "c", values, buffers=True)
    good = megatron_core.read(store, "c")
    entry = good.state_map.entries[TensorKey("embedding.word_embeddings.weight", "weight")]
    fragment = entry.fragments[0]
    data = bytearray(store.read(f"c/{fragment.file}"))
    data[fragment.offset_bytes : fragment.offset_bytes + 4] = b"\0\0\x80\x7f"
    store.write_atomic(f"c/{fragment.file}", bytes(data), fsync=False)
    with pytest.raises(UnsupportedVersionError, match="fully-reshardable"):
        megatron_core.read(store, "c")


def test_parameters_in_no_buffer_were_frozen() -> None:
    """Megatron's buffers hold what is trained; they must be filled by the rest, in one way."""
    values = state()
    names = ("embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc2.weight")
    checkpoint = _opened(values, buffers=True, frozen=frozenset(names))
    found = {
        name: tensor.bfloat16() if _is_of(name, "embedding.word", "linear_fc2") else tensor
        for name, tensor in expected(values, local=True).items()
        if not (_is_of(name, "embedding.word", "linear_fc2") and "exp_avg" in name)
    }
    assert unequal(checkpoint, found) == []
    assert checkpoint.manifest.roles == {
        "embedding.word_embeddings.weight": "frozen",
        "decoder.layers.0.mlp.linear_fc2.weight": "frozen",
        "decoder.layers.1.mlp.linear_fc2.weight": "frozen",
    }
    for key, tensor in values["param"].items():
        if "norm" in key:
            tensor.fill_(1.0)
    norms = frozenset({"decoder.layers.mlp.linear_fc1.layer_norm_weight"})
    with pytest.raises(UnsupportedVersionError, match="others have the same"):
        _opened(values, buffers=True, frozen=norms)


def _is_of(name: str, *parts: str) -> bool:
    return any(part in name for part in parts)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_last_stage_has_a_copy_of_a_tied_embedding(tp: int) -> None:
    """Only the first stage writes the weight, but both have it, in a bucket of its own.

    The bucket before ends where the next parameter could begin, not with its last one.
    """
    values = state()
    for tensors in values.values():
        del tensors["output_layer.weight"]
    checkpoint = _opened(values, tp=tp, pp=2, buffers=True)
    assert unequal(checkpoint, expected(values, local=True)) == []
    assert checkpoint.manifest.roles == {}


@pytest.mark.parametrize("buffers", [False, True], ids=["fully_reshardable", "dp_reshardable"])
def test_rows_behind_the_tokens_are_left_out_of_every_slot(*, buffers: bool) -> None:
    """Another number of ranks pads to another multiple, so padding is no state."""
    values = state()
    arguments = {"vocab_size": 83, "padded_vocab_size": 96, "make_vocab_size_divisible_by": 16,
                 "tensor_model_parallel_size": 2}  # fmt: skip
    checkpoint = _opened(values, buffers=buffers, arguments=arguments)
    found = {
        name: tensor[:83] if tensor.shape[:1] == (96,) else tensor
        for name, tensor in expected(values, local=True).items()
    }
    assert unequal(checkpoint, found) == []
    assert "83 of 96 rows" in checkpoint.manifest.items["vocabulary"].note


def test_padding_of_which_nothing_is_known_is_kept_and_said() -> None:
    """A tokenizer from a file is all that knew the size; a rule can say it."""
    values = state()
    arguments = {"vocab_size": None, "padded_vocab_size": 96}
    checkpoint = _opened(values, arguments=arguments)
    assert unequal(checkpoint, expected(values, local=True)) == []
    assert "keeps all 96 rows" in checkpoint.manifest.items["vocabulary"].note
    store = MemoryStore()
    write_checkpoint(store, "c", values, arguments=arguments)
    rule = "rules: [{match: 'embedding.*', pattern: {cut: {dim: 0, unpadded: %d}}}]"
    told = megatron_core.read(store, "c", rules=load_rules(rule % 90, "mine.yaml"))
    assert loaded(told, "embedding.word_embeddings.weight", "exp_avg").shape == (90, 8)
    assert loaded(told, "output_layer.weight").shape == (96, 8)
    with pytest.raises(PatternError, match="unpadded is 97"):
        megatron_core.read(store, "c", rules=load_rules(rule % 97, "mine.yaml"))


@pytest.mark.parametrize("weight", [None, 0.0], ids=["trained", "zeros"])
def test_experts_have_an_optimizer_of_their_own(weight: float | None) -> None:
    """Its buffers are of other ranks than those of the rest: experts differ, all else does not."""
    values = state(experts=True)
    for key, tensor in values["param"].items():
        if ".experts." in key and weight is not None:
            tensor.fill_(weight)
    checkpoint = _opened(values, tp=1, buffers=True)
    assert unequal(checkpoint, expected(values, local=True)) == []
    experts = [group for group in checkpoint.param_groups if group["is_expert_parallel"]]
    assert [len(group["params"]) for group in experts] == [4]


@pytest.mark.parametrize("weight", [None, 0.0], ids=["trained", "zeros"])
def test_experts_that_are_one_parameter_in_the_buffers_are_refused(weight: float | None) -> None:
    """They are transposed there, gate beside up: moments would be other elements', unnoticed."""
    values = state(experts=True)
    for key, tensor in values["param"].items():
        if ".experts." in key and weight is not None:
            tensor.fill_(weight)
    with pytest.raises(UnsupportedVersionError, match=r"linear_fc.*fully-reshardable"):
        _opened(values, tp=1, buffers=True, grouped=True)


def test_experts_without_ranks_of_their_own_are_in_the_groups_of_the_rest() -> None:
    """Megatron calls experts so only where they have ranks; their steps were lost otherwise."""
    checkpoint = _opened(state(experts=True), tp=1)
    name = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    assert name in checkpoint.param_groups[0]["params"]
    assert loaded(checkpoint, name, "step") == 4.0


def test_a_parameter_in_no_sure_group_has_the_step_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning rates of their own make more groups than the rule knows of; steps are the same."""
    twice = [megatron_files.GROUPS[0], {**megatron_files.GROUPS[0], "max_lr": 0.25}]
    monkeypatch.setattr(megatron_files, "GROUPS", [*twice, megatron_files.GROUPS[1]])
    checkpoint = _opened(state())
    assert checkpoint.param_groups[0]["params"] == []
    assert loaded(checkpoint, "output_layer.weight", "step") == 4.0


def test_ranges_of_flattened_parameters_are_refused() -> None:
    """Their shape is that of a grid of fragments, which would pass for the parameter's."""
    values = state()
    store = MemoryStore()
    save = Save()
    for slot in megatron_files.SLOTS:
        flat = values[slot]["output_layer.weight"].reshape(2, 1, -1)
        chunks = [Chunk(offsets=(i, 0, 0), data=flat[i : i + 1].clone(), rank=i) for i in (0, 1)]
        save.tensors[f"optimizer.state.{slot}.output_layer.weight"] = (tuple(flat.shape), chunks)
    weight = values["param"]["output_layer.weight"].bfloat16()
    save.tensors["output_layer.weight"] = (
        tuple(weight.shape),
        [Chunk(offsets=(0, 0), data=weight)],
    )
    save.objects["common_state/shard_0_1"] = [{"iteration": 4}]
    write(store, "c", save)
    store.write_atomic("c/metadata.json", b'{"sharded_backend": "torch_dist"}', fsync=False)
    with pytest.raises(UnsupportedVersionError, match="fully-reshardable"):
        megatron_core.read(store, "c")


def test_state_that_one_rank_gathered_is_refused() -> None:
    """It is a pickle of buffers: weights alone would look whole, and lose the moments."""
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    with pytest.raises(UnsupportedVersionError, match="fully-reshardable"):
        _opened(state(), objects={key: [{"buckets_coalesced": True}]})


def test_the_latest_iteration_is_found_and_others_by_name() -> None:
    """Megatron keeps all iterations in one folder, and the number of the last one in a file."""
    store = MemoryStore()
    for iteration, seed in ((4, 0), (8, 50)):
        write_checkpoint(store, f"c/iter_{iteration:07d}", state(seed))
    store.write_atomic("c/latest_checkpointed_iteration.txt", b"8\n", fsync=False)
    assert recognise(store, "c")
    assert unequal(megatron_core.read(store, "c"), expected(state(50), local=True)) == []
    older = megatron_core.read(store, "c", tag="iter_0000004")
    assert unequal(older, expected(state(0), local=True)) == []
    store.write_atomic("c/latest_checkpointed_iteration.txt", b"../../etc", fsync=False)
    assert not recognise(store, "c")
    with pytest.raises(CheckpointCorruptError, match="not an iteration"):
        megatron_core.read(store, "c")


def test_other_objects_are_kept_with_a_policy() -> None:
    """Random state is by rank and cannot be resharded; silently dropping it would be worse."""
    objects = {
        "rng_state/shard_0.0_1.2": [[{"torch_rng_state": torch.arange(9, dtype=torch.uint8)}]],
        "rerun_state_machine_state/shard_0_1": [{"mode": "disabled"}],
    }
    checkpoint = _opened(state(), objects=objects)
    items = checkpoint.manifest.items
    assert items["rng_state"].policy == "reseed"
    assert items["rerun_state_machine_state"].policy == "replicate"
    kept = checkpoint.extra["rng_state"]["shard_0.0_1.2"][0][0]["torch_rng_state"]
    assert (kept["dtype"], kept["shape"]) == ("U8", [9])


def test_other_backends_and_forms_say_what_to_do() -> None:
    """zarr is gone from Megatron; a flattened optimizer state cannot be told apart."""
    store = MemoryStore()
    write_checkpoint(store, "c", state())
    config = {"sharded_backend": "zarr"}
    good = store.read("c/metadata.json")
    store.write_atomic("c/metadata.json", json.dumps(config).encode(), fsync=False)
    with pytest.raises(UnsupportedVersionError, match="torch_dist"):
        megatron_core.read(store, "c")
    store.write_atomic("c/metadata.json", b"[", fsync=False)
    with pytest.raises(CheckpointCorruptError, match="it is not as Megatron-core writes it"):
        megatron_core.read(store, "c")
    store.write_atomic("c/metadata.json", good, fsync=False)
    store.delete("c/common.pt")
    with pytest.raises(CheckpointCorruptError, match=r"common\.pt"):
        megatron_core.read(store, "c")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        megatron_core.read(store, "nowhere")


def test_a_lost_configuration_does_not_make_it_a_checkpoint_of_plain_dcp() -> None:
    """Its tensors would keep Megatron's names, stacked, and no optimizer."""
    store = MemoryStore()
    write_checkpoint(store, "c", state())
    store.delete("c/metadata.json")

    with pytest.raises(CheckpointCorruptError, match=r"lacks metadata\.json"):
        open_source(store, "c")


def test_weights_that_are_nowhere_their_rounded_masters_are_no_sign_of_damage() -> None:
    """Parameters in fp8 are saved as what they stand for, which no master rounds to."""
    values = state()
    store = MemoryStore()
    write_checkpoint(store, "c", values | {"model": state(seed=9)["param"]})

    assert unequal(open_source(store, "c"), expected(values, local=True)) == []
