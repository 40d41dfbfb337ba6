"""Weights come out as the Hugging Face tools want them, whole or not at all."""

import json
import random
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from tests.support.checkpoints import ROOT, State, Whole, save, small_state
from ucp_core.errors import UcpError
from ucp_core.formats import warnings_of
from ucp_core.formats.huggingface import reader as huggingface
from ucp_core.formats.huggingface import writer as huggingface_writer
from ucp_core.geometry import TensorKey
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore

MEMORY = 8 << 20


def _checkpoint(state: State, *, store: MemoryStore | None = None, **changes: Any) -> Checkpoint:
    store = store or MemoryStore()
    save(store, state, step=7)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    return replace(opened, manifest=replace(opened.manifest, **changes))


def _weights(**arrays: np.ndarray[Any, Any]) -> State:
    names = {"float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL", "uint16": "BF16"}
    return {
        TensorKey(name, "weight"): Whole(
            dtype=names[str(array.dtype)], shape=array.shape, data=array.tobytes()
        )
        for name, array in arrays.items()
    }


def test_a_buffer_stays_float32_where_its_model_is_unknown(tmp_path: Path) -> None:
    """Neither a class of transformers nor a configuration says what must not be narrower."""
    state = _weights(bias=np.array([6.9, 6.91], np.float32), w=np.ones(3, np.float32))
    documents = {"config.json": {"architectures": ["NoSuchModel"], "dtype": "float32"}}
    source = _checkpoint(state, roles={"bias": "buffer"}, extra={"huggingface": documents})

    huggingface_writer.write(source, LocalStore(), str(tmp_path), memory_bytes=MEMORY, dtype="bf16")

    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded["bias"].tolist() == np.array([6.9, 6.91], np.float32).tolist()
    assert loaded["w"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    told = warnings_of(source, format="huggingface", dtype="bf16")
    assert told[0] == "bias stay float32 (buffers)"
    assert "NoSuchModel" in told[1]


def test_files_are_cut_and_the_index_names_each_tensor(tmp_path: Path) -> None:
    """One tensor above the size has a file of its own; none is cut."""
    arrays = {f"l.{i}": np.full(i * 4 + 1, i, dtype=np.float32) for i in range(8)}
    state = _weights(**arrays)

    huggingface_writer.write(
        _checkpoint(state), LocalStore(), str(tmp_path), memory_bytes=MEMORY, shard_bytes=80
    )

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files[0].endswith(f"-of-{len(files):05d}.safetensors")
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "np") as opened:
            np.testing.assert_array_equal(opened.get_tensor(name), arrays[name])
            assert opened.metadata() == {"format": "pt"}
            num_bytes = sum(arrays[other].nbytes for other in opened.keys())  # noqa: SIM118 - not a dict
            assert num_bytes <= 80 or len(opened.keys()) == 1


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bf16", "BF16"), ("FP16", "F16"), ("fp32", "F32")]
)
def test_floats_are_cast_and_everything_else_is_kept(
    tmp_path: Path, dtype: str, expected: str
) -> None:
    """Token counts and masks are buffers; rounded they would be wrong."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "w": rng.standard_normal((300, 301)).astype(np.float32),
        "d": rng.standard_normal(1000),
        "seen": np.array([2**60 + 1]),
        "mask": np.array([True, False]),
    }
    checkpoint = _checkpoint(_weights(**arrays))

    huggingface_writer.write(
        checkpoint, LocalStore(), str(tmp_path), memory_bytes=MEMORY, dtype=dtype
    )

    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    wanted = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[expected]
    for name in ("w", "d"):
        assert loaded[name].dtype == wanted
        assert torch.equal(loaded[name], torch.from_numpy(arrays[name]).to(wanted)), name
    assert loaded["seen"].item() == 2**60 + 1
    assert loaded["mask"].tolist() == [True, False]


@pytest.mark.parametrize("keep_tied", [False, True])
def test_a_tied_name_is_left_out_and_noted_or_kept(tmp_path: Path, *, keep_tied: bool) -> None:
    """Some tools tie by themselves, some want every name."""
    state = _weights(embed=np.arange(6, dtype=np.float32), other=np.ones(2, dtype=np.float32))
    checkpoint = _checkpoint(state, ties={"head": "embed"})

    huggingface_writer.write(
        checkpoint, LocalStore(), str(tmp_path), memory_bytes=MEMORY, keep_tied=keep_tied
    )

    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        names = set(opened.keys())
        if keep_tied:
            assert names == {"embed", "head", "other"}
            np.testing.assert_array_equal(opened.get_tensor("head"), np.arange(6))
        else:
            assert names == {"embed", "other"}
            assert opened.metadata() == {"format": "pt", "head": "embed"}
    reread = huggingface.read(LocalStore(), str(tmp_path))
    assert reread.manifest.ties == ({} if keep_tied else {"head": "embed"})


def test_what_safetensors_itself_ties_loads_into_a_module(tmp_path: Path) -> None:
    """``load_model`` reads the note and ties again."""
    state = _weights(**{"embed.weight": np.arange(6, dtype=np.float32).reshape(3, 2)})
    checkpoint = _checkpoint(state, ties={"head.weight": "embed.weight"})
    huggingface_writer.write(checkpoint, LocalStore(), str(tmp_path), memory_bytes=MEMORY)
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(3, 2)
    module.head = torch.nn.Linear(2, 3, bias=False)
    module.head.weight = module.embed.weight

    safetensors.torch.load_model(module, tmp_path / "model.safetensors")

    assert module.head.weight.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_configuration_comes_along_with_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """transformers casts to the configuration's dtype on loading."""
    documents = {
        "config.json": {"model_type": "llama", "torch_dtype": "float32"},
        "../evil.json": {},
    }
    checkpoint = _checkpoint(small_state(), extra={"huggingface": documents})

    huggingface_writer.write(
        checkpoint, LocalStore(), str(tmp_path / "out"), memory_bytes=MEMORY, dtype="bf16"
    )

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert not (tmp_path / "evil.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "'int4' is none of fp32"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"memory_bytes": 1}, "give at least"),
    ],
)
def test_a_wrong_option_writes_nothing(options: dict[str, Any], message: str) -> None:
    """It is found before the first byte, not after an hour."""
    store = MemoryStore()

    with pytest.raises(UcpError, match=message):
        huggingface_writer.write(
            _checkpoint(small_state()), store, "out", **({"memory_bytes": MEMORY} | options)
        )
    assert store.list("out") == ()


def test_a_destination_in_use_is_refused() -> None:
    """Shards of two models in one folder are neither."""
    store = MemoryStore()
    store.write_atomic("out/model-00001-of-00009.safetensors", b"x", fsync=False)

    with pytest.raises(UcpError, match=r"00001-of-00009.* already"):
        huggingface_writer.write(_checkpoint(small_state()), store, "out", memory_bytes=MEMORY)
    assert store.list("out") == ("model-00001-of-00009.safetensors",)


def test_a_checkpoint_without_weights_is_refused() -> None:
    """Moments alone are no model."""
    state = {key: value for key, value in small_state().items() if key.slot != "weight"}

    with pytest.raises(UcpError, match="no weights"):
        huggingface_writer.write(_checkpoint(state), MemoryStore(), "out", memory_bytes=MEMORY)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    """Bytes read, also where they are cast."""
    state = small_state(random.Random(3).randrange(100))
    seen: list[tuple[int, int]] = []

    huggingface_writer.write(
        _checkpoint(state),
        LocalStore(),
        str(tmp_path),
        memory_bytes=MEMORY,
        dtype="fp16",
        progress=lambda done, total: seen.append((done, total)),
    )

    total = sum(4 * prod(v.shape) for k, v in state.items() if k.slot == "weight")
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
