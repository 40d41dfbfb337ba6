"""A checkpoint for Megatron-core reads back as it was; state that has no place is refused."""

import io
import random
import struct
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import Whole, local_tensors
from tests.support.foreign_reading import loaded
from tests.support.made import save_part
from tests.support.megatron_files import state, write_checkpoint
from ucp_core.errors import UcpError
from ucp_core.formats import export, open_source
from ucp_core.geometry import Box, TensorKey
from ucp_core.inspection import diff
from ucp_core.language import rename
from ucp_core.native import Checkpoint
from ucp_core.storage import MemoryStore

MEMORY_BYTES = 16 << 20


def _exported(source: Checkpoint, **options: Any) -> tuple[MemoryStore, Checkpoint]:
    store = MemoryStore()
    export(source, store, "out", format="megatron-core", memory_bytes=MEMORY_BYTES, **options)
    return store, open_source(store, "out")


def _megatrons(**options: Any) -> Checkpoint:
    store = MemoryStore()
    write_checkpoint(store, "c", state(experts=options.pop("experts", False)), **options)
    return open_source(store, "c")


def _common(store: MemoryStore) -> dict[str, Any]:
    data = io.BytesIO(store.read("out/iter_0000004/common.pt"))
    found: dict[str, Any] = torch.load(data, weights_only=False)
    return found


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("local", [False, True], ids=["transformer-engine", "local"])
@pytest.mark.parametrize("buffers", [False, True], ids=["fully_reshardable", "dp_reshardable"])
def test_what_megatron_saved_comes_back(*, experts: bool, local: bool, buffers: bool) -> None:
    """All slots, names of both kinds of modules, states of modules and hyper-parameters."""
    source = _megatrons(experts=experts, local=local, buffers=buffers)

    _, back = _exported(source)

    report = diff(source, back)
    assert report.tensors == ()
    assert report.num_equal == len(source.state_map.entries)
    assert not [v for v in report.values if not v.path.startswith(("param_groups", "extra."))]
    assert back.extra.get("_extra_state") == source.extra.get("_extra_state")


def test_megatron_finds_its_arguments_and_its_random_states_as_it_saved_them() -> None:
    """Python's generator takes back a tuple only, and numpy's an array."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    objects = {"rng_state/shard_0.0_1.1": [[dict(zip("pnt", kept, strict=True))]]}
    source = _megatrons(objects=objects, arguments={"num_layers": 2})

    store, back = _exported(source)

    assert _common(store)["args"] == Namespace(num_layers=2)
    assert back.extra["rng_state"] == source.extra["rng_state"]
    ((states,),) = back.extra["rng_state"]["shard_0.0_1.1"]
    assert states["p"]["tuple"][1]["tuple"] == list(kept[0][1])


def test_layers_that_differ_have_keys_of_their_own() -> None:
    """Megatron stacks layers only if all of them are alike."""
    source = _megatrons()
    renamed = {
        key.fqn: key.fqn.replace("layers.1.mlp.", "layers.1.other.")
        for key in source.state_map.entries
        if "layers.1.mlp." in key.fqn
    }
    source = replace(source, manifest=rename(source.manifest, renamed))

    store, back = _exported(source)

    assert diff(source, back).tensors == ()
    assert _common(store)["content_metadata"]["non_homogeneous_layers"]
    assert b"decoder.layers.1.other.linear_fc1.weight" in store.read("out/iter_0000004/.metadata")


#: A matrix and a vector, which Megatron does not decay.
SHAPES = {"decoder.layers.0.mlp.linear_fc1.weight": (6, 4), "decoder.final_layernorm.weight": (4,)}
HYPER = {"lr": 0.5, "betas": [0.9, 0.95], "weight_decay": 0.1}


def _numbers(shape: tuple[int, ...], first: int) -> bytes:
    return (np.arange(prod(shape), dtype=np.float32) + 100 * first).tobytes()


def _native(
    shapes: Mapping[str, tuple[int, ...]],
    groups: Sequence[dict[str, Any]],
    steps: Mapping[str, float] | None = None,
) -> Checkpoint:
    """Return what a run of ours saved after four steps, which knows nothing of Megatron."""
    state = {
        TensorKey(fqn, slot): Whole(dtype="F32", shape=shape, data=_numbers(shape, number))
        for number, (fqn, shape) in enumerate(shapes.items())
        for slot in ("weight", "exp_avg", "exp_avg_sq")
    }
    for fqn in shapes:
        data = struct.pack("<f", (steps or {}).get(fqn, 4.0))
        state[TensorKey(fqn, "step")] = Whole(dtype="F32", shape=(), data=data)
    store = MemoryStore()
    tensors = local_tensors(state, {key: [Box.full(one.shape)] for key, one in state.items()})
    extra = {"mine": [1, "two"]}
    save_part(store, "c", tensors, step=4, attempt=0, extra=extra, param_groups=groups)
    return open_source(store, "c")


def test_groups_are_those_that_megatron_looks_for() -> None:
    """It finds a group by its multipliers, and counts the steps of a group."""
    source = _native(SHAPES, [{**HYPER, "params": [*SHAPES]}])

    store, back = _exported(source)

    common = _common(store)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(1.0, 4.0), (0.0, 4.0)]
    expected = {"lr": 0.5, "max_lr": 0.5, "betas": (0.9, 0.95), "is_expert_parallel": False}
    assert all(group.items() >= expected.items() for group in groups)
    assert all("params" not in group for group in groups)
    assert (common["iteration"], common["mine"]) == (4, [1, "two"])
    assert diff(source, back).num_equal == len(source.state_map.entries)


#: Hugging Face's names, with heads of two rows: four of q, in two groups.
LLAMA = {
    "model.layers.0.self_attn.q_proj.weight": (8, 3),
    "model.layers.0.self_attn.k_proj.weight": (4, 3),
    "model.layers.0.self_attn.v_proj.weight": (4, 3),
    "model.layers.0.mlp.gate_proj.weight": (5, 3),
    "model.layers.0.mlp.up_proj.weight": (5, 3),
}


@pytest.mark.parametrize("chunk_bytes", [4, 28, 1 << 20])
def test_parts_of_hugging_face_are_one_parameter(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Wherever a chunk ends: inside of a row, of a group, or behind all."""
    monkeypatch.setattr("ucp_core.formats.dcp.writer.CHUNK_BYTES", chunk_bytes)
    source = _native(LLAMA, [{**HYPER, "params": [*LLAMA]}])

    _, back = _exported(source, query_groups=2)

    for slot in ("weight", "exp_avg", "exp_avg_sq"):
        q, k, v, gate, up = (loaded(source, fqn, slot) for fqn in LLAMA)
        groups = [part.reshape(2, -1, 3) for part in (q, k, v)]
        assert np.array_equal(
            loaded(back, "decoder.layers.0.self_attention.linear_qkv.weight", slot),
            np.concatenate(groups, axis=1).reshape(-1, 3),
        )
        assert np.array_equal(
            loaded(back, "decoder.layers.0.mlp.linear_fc1.weight", slot), np.concatenate([gate, up])
        )


@pytest.mark.parametrize(
    ("leave_out", "query_groups", "told"),
    [
        ("model.layers.0.mlp.up_proj.weight", 2, "linear_fc1.weight has no up beside"),
        ("", None, "number of heads of model.layers.0.self_attn.k_proj.weight: give query_groups"),
        ("", 3, "query_groups=3 does not divide the 4 rows of model.layers.0.self_attn.k_proj"),
    ],
)
def test_parts_that_make_up_no_parameter_are_refused(
    leave_out: str, query_groups: int | None, told: str
) -> None:
    shapes = {fqn: shape for fqn, shape in LLAMA.items() if fqn != leave_out}
    source = _native(shapes, [{**HYPER, "params": [*shapes]}])

    with pytest.raises(UcpError, match=told):
        _exported(source, query_groups=query_groups)


#: By the names of transformers: Megatron's, behind ``decoder.layers.0.``.
DEEPSEEK = {
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight", (2, 4)),
    "self_attn.q_a_layernorm.weight": ("self_attention.q_layernorm.weight", (2,)),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight", (6, 2)),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight", (3, 4)),
    "self_attn.kv_a_layernorm.weight": ("self_attention.kv_layernorm.weight", (2,)),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight", (8, 2)),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", (4, 4)),
    "mlp.experts.gate_up_proj": ("mlp.experts.experts.linear_fc1.weight", (6, 10, 4)),
    "mlp.experts.down_proj": ("mlp.experts.experts.linear_fc2.weight", (6, 4, 5)),
    "mlp.gate.weight": ("mlp.router.weight", (6, 4)),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias", (6,)),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight", (4, 5)),
}


def test_experts_of_transformers_are_megatrons() -> None:
    """Those of DeepSeek, beside its attention: equal bits under other names."""
    theirs = {f"model.layers.0.{name}": shape for name, (_, shape) in DEEPSEEK.items()}
    source = _native(theirs, [{**HYPER, "params": [*theirs]}])

    store, back = _exported(source, ep=2)

    mine = {
        f"model.layers.0.{one}": f"decoder.layers.0.{name}" for one, (name, _) in DEEPSEEK.items()
    }
    assert diff(replace(source, manifest=rename(source.manifest, mine)), back).tensors == ()
    assert [*_common(store)["optimizer"]] == [0, 1]
    with pytest.raises(UcpError, match="ep=4: the source has 6 experts in a layer"):
        _exported(source, ep=4)


@pytest.mark.parametrize(
    ("shapes", "steps", "changed", "options", "told"),
    [
        ({"head.weight": (4,)}, {}, {}, {}, "head.weight is not a name of Megatron-core"),
        (
            SHAPES,
            {"decoder.2.weight": 3.0},
            {},
            {},
            "decoder.2.weight 3.0, but Megatron counts one",
        ),
        (SHAPES, {}, {"lr": 0.1}, {}, "differ in lr of the optimizer: Megatron has one group"),
        (SHAPES, {}, {}, {"ep": 2}, "ep=2: the source has no experts"),
        (SHAPES, {}, {}, {"ep": 0}, "ep=0: "),
    ],
)
def test_what_megatron_cannot_hold_is_refused(
    shapes: dict[str, tuple[int, ...]],
    steps: dict[str, float],
    changed: dict[str, Any],
    options: dict[str, Any],
    told: str,
) -> None:
    more = {"decoder.2.weight": (6, 4)}
    groups = [{**HYPER, "params": [*shapes]}, {**HYPER, **changed, "params": [*more]}]
    source = _native(shapes | more, groups, steps)
    store = MemoryStore()

    with pytest.raises(UcpError, match=told):
        export(source, store, "out", format="megatron-core", memory_bytes=MEMORY_BYTES, **options)

    assert store.list("out") == ()


def test_an_iteration_is_not_put_beside_others() -> None:
    """The file that names the latest one would lead to another run's."""
    store, _ = _exported(_megatrons())

    with pytest.raises(UcpError, match="out holds iter_0000004 already"):
        export(_megatrons(), store, "out", format="megatron-core", memory_bytes=MEMORY_BYTES)
