"""Weights in torch's own files are read as they lie, without torch."""

import io
import json
import sys
from typing import Any

import pytest
import torch

from tests.support.foreign_reading import loaded
from tests.support.hostile_pickles import Payload
from ucp_core.errors import CheckpointCorruptError, ForeignClassError
from ucp_core.formats import open_source
from ucp_core.inspection import verify
from ucp_core.storage import MemoryStore

INDEX = "pytorch_model.bin.index.json"


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embed = torch.randn(5, 3)
    return {
        "embed.weight": embed,
        "turned": torch.randn(4, 3).T,
        "half": torch.randn(2, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "head.weight": embed,
    }


def _store(**files: Any) -> MemoryStore:
    store = MemoryStore()
    for name, value in files.items():
        data = value if isinstance(value, bytes) else _saved(value)
        store.write_atomic(f"m/{name}", data, fsync=False)
    return store


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize("path", ["m", "m/pytorch_model.bin"])
def test_a_state_dict_is_read_with_its_ties(path: str) -> None:
    """``save_16bit_model`` leaves nothing else; strided and empty tensors are in it as well."""
    weights = _weights()
    store = _store(**{"pytorch_model.bin": weights, "config.json": b'{"model_type": "tiny"}'})

    checkpoint = open_source(store, path)

    for name, tensor in weights.items():
        if name != "head.weight":
            assert torch.equal(loaded(checkpoint, name), tensor), name
    assert checkpoint.manifest.ties == {"head.weight": "embed.weight"}
    assert verify(checkpoint) == []


def test_files_of_an_index_are_one_model() -> None:
    """Each file is a state dict of its own."""
    weights = _weights()
    parts = {"a.bin": ["embed.weight", "head.weight"], "b.bin": ["turned", "half", "scalar"]}
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    files: dict[str, Any] = {f: {n: weights[n] for n in names} for f, names in parts.items()}
    store = _store(**files, **{INDEX: json.dumps(index).encode()})

    checkpoint = open_source(store, "m")

    assert torch.equal(loaded(checkpoint, "turned"), weights["turned"])
    assert {key.fqn for key in checkpoint.state_map.entries} == {
        "embed.weight",
        "turned",
        "half",
        "scalar",
    }
    store.write_atomic("m/b.bin", _saved({"half": weights["half"]}), fsync=False)
    with pytest.raises(CheckpointCorruptError, match=r"b\.bin.*'scalar', but it does not"):
        open_source(store, "m")
    store.delete("m/b.bin")
    with pytest.raises(CheckpointCorruptError, match=r"lacks b\.bin"):
        open_source(store, "m")


def test_a_flipped_bit_is_found() -> None:
    """torch writes a checksum of every storage and never looks at it."""
    store = _store(**{"pytorch_model.bin": _weights()})
    checkpoint = open_source(store, "m")
    entry = next(e for e in checkpoint.state_map.entries.values() if e.key.fqn == "turned")
    data = bytearray(store.read("m/pytorch_model.bin"))
    data[entry.fragments[0].offset_bytes + 5] ^= 1
    store.write_atomic("m/pytorch_model.bin", bytes(data), fsync=False)

    assert verify(checkpoint) != []


@pytest.mark.parametrize("tree", [{"module": {"a": 1}, "step": 3}, {1: torch.ones(1)}])
def test_what_is_no_state_dict_is_refused(tree: Any) -> None:
    """A rank's file of a checkpoint would be read as nothing, or as the model of one rank."""
    store = _store(**{"mp_rank_00_model_states.pt": tree})

    with pytest.raises(CheckpointCorruptError, match="give the checkpoint's folder"):
        open_source(store, "m/mp_rank_00_model_states.pt")


def test_a_pickle_that_would_run_code_is_refused() -> None:
    """Downloaded weights are a usual way to be given one."""
    store = _store(**{"pytorch_model.bin": {"a": Payload(sys.exit, 1)}})

    with pytest.raises(ForeignClassError):
        open_source(store, "m")
