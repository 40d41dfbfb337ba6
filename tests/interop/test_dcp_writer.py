"""torch's own distributed checkpoint loads what we write, bit for bit."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.support.checkpoints import ROOT, State, Whole, random_state, save, small_state
from ucp_core.conversion import convert
from ucp_core.errors import UcpError
from ucp_core.formats import export, left_behind, open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.geometry import TensorKey
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore

MEMORY = 8 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _checkpoint(state: State, store: MemoryStore | None = None, **changes: Any) -> Checkpoint:
    store = store or MemoryStore()
    save(store, state, step=7)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    return replace(opened, manifest=replace(opened.manifest, **changes))


def _written(checkpoint: Checkpoint, directory: Path, **options: Any) -> str:
    dcp_writer.write(checkpoint, LocalStore(), str(directory), memory_bytes=MEMORY, **options)
    return str(directory)


def _everything(directory: str) -> dict[str, Any]:
    """Return all that stock DCP finds, as nested as it was."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(directory),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _truths(state: State) -> State:
    """Return the state with truth values of 0 and 1: torch makes others 1 when it copies."""
    return {
        key: replace(tensor, data=bytes(b & 1 for b in tensor.data))
        if tensor.dtype == "BOOL"
        else tensor
        for key, tensor in state.items()
    }


@pytest.fixture(params=[None, 64], ids=["real chunks", "tiny chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes and files of 3000 make small tensors meet every case of large ones."""
    if request.param:
        monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", request.param)
        monkeypatch.setattr(dcp_writer, "FILE_BYTES", 3000)


@pytest.mark.usefixtures("_chunks")
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15
)
@given(seed=st.integers(0, 2**32))
def test_any_state_loads_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """All dtypes, 0-d and empty tensors, native and universal sources."""
    state = _truths(random_state(random.Random(seed)))
    store = MemoryStore()
    native = _checkpoint(state, store)
    convert(native, store, "universal", memory_bytes=MEMORY, processes=1)
    for source in (native, open_checkpoint(store, "universal")):
        found = _everything(_written(source, tmp_path_factory.mktemp("dcp") / "out"))

        for key in source.state_map.entries:
            if key.slot == "weight":
                tensor = found["model"][key.fqn]
            else:
                tensor = found["optim"]["state"][key.fqn][key.slot]
            assert tuple(tensor.shape) == state[key].shape
            assert _bytes(tensor) == state[key].data, key
        assert found["optim"]["param_groups"] == [{"params": ["of.rank.0", "of.rank.1"], "lr": 0.1}]
        assert found["cursor"] == {"step": 7}


def test_a_large_tensor_is_cut_into_chunks_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of some rows reads whole chunks, so they must not be the whole tensor."""
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 64)
    monkeypatch.setattr(dcp_writer, "FILE_BYTES", 3000)
    data = random.Random(0).randbytes(4 * 64 * 3)
    state = {TensorKey("w", "weight"): Whole(dtype="F32", shape=(64, 3), data=data)}

    directory = _written(_checkpoint(state), tmp_path / "out")

    metadata = FileSystemReader(directory).read_metadata()
    described = metadata.state_dict_metadata["model.w"]
    assert isinstance(described, TensorStorageMetadata)
    chunks = described.chunks
    assert [tuple(c.offsets) for c in chunks[:3]] == [(0, 0), (5, 0), (10, 0)]
    assert {tuple(c.sizes) for c in chunks[:-1]} == {(5, 3)}
    files = sorted(path.name for path in (tmp_path / "out").glob("*.distcp"))
    assert len(files) > 2
    assert {info.relative_path for info in metadata.storage_data.values()} == set(files)
    target = {"model": {"w": torch.zeros(64, 3)}}
    dcp.load(target, checkpoint_id=directory, no_dist=True)
    assert _bytes(target["model"]["w"]) == data


def test_hyper_parameters_come_in_either_convention(tmp_path: Path) -> None:
    """Each group has its own, and torch wants betas as a tuple."""
    groups = [
        {"params": ["wte", "head"], "lr": 0.1, "betas": [0.9, 0.95], "foreach": None},
        {"params": ["norm"], "lr": 0.2, "betas": [0.8, 0.9], "foreach": None},
    ]
    checkpoint = _checkpoint(small_state(), param_groups=groups)

    nested = _everything(_written(checkpoint, tmp_path / "nested"))
    flat = _everything(
        _written(checkpoint, tmp_path / "flat", flatten_optimizer=True, optimizer="optimizer")
    )

    assert nested["optim"]["param_groups"][1] == groups[1] | {"betas": (0.8, 0.9)}
    assert isinstance(nested["optim"]["param_groups"][1]["betas"], tuple)
    assert flat["optimizer"]["param_groups.head.lr"] == 0.1
    assert flat["optimizer"]["param_groups.norm.betas"] == (0.8, 0.9)
    assert "param_groups.norm.params" not in flat["optimizer"]
    weights = flat["optimizer"]["state"]["wte"]["exp_avg"]
    assert _bytes(weights) == small_state()[TensorKey("wte", "exp_avg")].data


def test_a_tied_name_leads_to_the_same_bytes(tmp_path: Path) -> None:
    """A state dict of a tied model asks for both names; two copies would double the file."""
    checkpoint = _checkpoint(small_state(), ties={"lm_head": "wte"})

    directory = _written(checkpoint, tmp_path / "out", model="")

    metadata = FileSystemReader(directory).read_metadata()
    places = {
        index.fqn: (info.relative_path, info.offset)
        for index, info in metadata.storage_data.items()
    }
    assert places["lm_head"] == places["wte"]
    target = {"lm_head": torch.zeros(8, 4), "wte": torch.zeros(8, 4)}
    dcp.load(target, checkpoint_id=directory, no_dist=True)
    assert _bytes(target["lm_head"]) == small_state()[TensorKey("wte", "weight")].data


def test_frozen_names_that_lead_to_the_same_bytes_are_tied_again(tmp_path: Path) -> None:
    """As embedding and head of LoRA's base model; another frozen tensor of equal bytes is not."""
    state = small_state()
    state[TensorKey("twin", "weight")] = state[TensorKey("wte", "weight")]
    del state[TensorKey("wte", "exp_avg")]
    roles = {"wte": "frozen", "twin": "frozen"}
    trained = [{"params": ["norm", "head", "step"], "lr": 0.1}]
    checkpoint = _checkpoint(state, ties={"lm_head": "wte"}, roles=roles, param_groups=trained)

    found = open_source(LocalStore(), _written(checkpoint, tmp_path / "out"))

    assert found.manifest.ties == {"lm_head": "wte"}
    assert found.manifest.roles == roles


def test_extra_values_lie_where_dcp_would_put_them(tmp_path: Path) -> None:
    """A scheduler's state dict is nested, and lists of plain values stay lists."""
    extra = {
        "train": {"step": 4, "tokens": 10**12},
        "lr_scheduler": {"base_lrs": [0.1, 0.2], "nested": [{"a": 1}, {"b": [None, "x"]}]},
        "seed": 3,
    }

    found = _everything(_written(_checkpoint(small_state(), extra=extra), tmp_path / "out"))

    assert {name: found[name] for name in extra} == extra
    assert open_source(LocalStore(), str(tmp_path / "out")).extra == extra
    target: dict[str, Any] = {"train": {"step": 0}, "seed": 0}
    dcp.load(target, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert target == {"train": {"step": 4}, "seed": 3}


USER = {
    "step": 3,
    "seen": torch.tensor(7),
    "scale": torch.tensor(0.1),
    "best": float("inf"),
    "plain": [1, [2, 3], "x", []],
    "tuple": (1, 2.5, None),
    "deep": {"t": (1, (2, [3, (4,)]), {5: float("-inf")}), "lists": [[1, 2], [3]]},
    "of tuples": [(1, 2), (3, 4)],
    "of dicts": [{"a": 1}, {"b": [1, 2]}],
    "with tensors": [torch.arange(3.0), {"a": torch.ones(2, 2), "b": (5, 6)}, 7],
    "tuple of tensors": (torch.ones(2), torch.zeros(1, dtype=torch.int16)),
    "average": {"0.weight": torch.full((4, 3), 0.5)},
    "empty": [(), []],
    "rng": torch.get_rng_state(),
    "python": random.Random(5).getstate(),
    "half": torch.ones(3, dtype=torch.float16),
    "truth": torch.tensor(data=True),
    "loader": {"dp_rank_0": bytes([7, 255])},
    "list of bytes": [{"bytes": [bytes([7])]}, torch.full((3,), 7, dtype=torch.uint8)],
}


def _assert_same(found: Any, expected: Any, where: str) -> None:
    """By type and value, to the bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def test_what_a_user_saved_beside_the_model_comes_back_as_torch_gives_it(tmp_path: Path) -> None:
    """A random state is a tuple, and a list does not pass for one. Both ways, and both twice."""
    weights = {"0.weight": torch.randn(4, 3), "0.bias": torch.randn(4)}
    dcp.save({"model": weights, "mine": USER}, checkpoint_id=tmp_path / "in", no_dist=True)
    expected = _everything(str(tmp_path / "in"))
    source = open_source(LocalStore(), str(tmp_path / "in"))
    convert(source, LocalStore(), str(tmp_path / "universal"), memory_bytes=MEMORY, processes=1)
    universal = open_checkpoint(LocalStore(), str(tmp_path / "universal"))
    direct = _written(source, tmp_path / "direct")
    again = open_source(LocalStore(), _written(universal, tmp_path / "by universal"))

    _assert_same(expected["mine"], USER, "torch")
    for directory in (direct, again.directory, _written(again, tmp_path / "again")):
        found = _everything(directory)
        assert found.keys() == expected.keys()
        _assert_same(found["mine"], expected["mine"], directory)
    assert again.extra == source.extra
    assert again.step == 3


def test_tensors_of_a_user_are_in_no_file_of_weights(tmp_path: Path) -> None:
    """Other tools load all that is there, and may find a name of their model among them."""
    weights = {"0.weight": torch.randn(4, 3), "0.bias": torch.randn(4)}
    dcp.save({"model": weights, "mine": USER}, checkpoint_id=tmp_path / "in", no_dist=True)
    source = open_source(LocalStore(), str(tmp_path / "in"))

    for form in ("huggingface", "universal"):
        where = LocalStore(), str(tmp_path / form)
        export(source, *where, format=form, memory_bytes=MEMORY)
    left = left_behind(source, format="huggingface")

    assert load_file(tmp_path / "huggingface/model.safetensors").keys() == weights.keys()
    assert "tensor mine.average.0.weight" in left
    universal = tmp_path / "universal"
    index = json.loads((universal / "model.safetensors.index.json").read_text())
    (model,) = universal.glob("model-*.safetensors")
    (outside,) = universal.glob("outside-*.safetensors")
    assert index["weight_map"].keys() == load_file(model).keys() == weights.keys()
    assert torch.equal(load_file(outside)["mine.average.0.weight"], torch.full((4, 3), 0.5))


@pytest.mark.parametrize("name", ["__3_0.distcp", ".metadata"])
def test_a_destination_in_use_is_refused(name: str) -> None:
    """Old metadata with new data loads without an error, with wrong values."""
    store = MemoryStore()
    store.write_atomic(f"out/{name}", b"x", fsync=False)

    with pytest.raises(UcpError, match=f"{name} already"):
        dcp_writer.write(_checkpoint(small_state()), store, "out", memory_bytes=MEMORY)
    assert store.list("out") == (name,)


def test_two_values_of_one_name_are_refused() -> None:
    """One would overwrite the other when it is loaded."""
    checkpoint = _checkpoint(small_state(), extra={"model": {"wte": 3}})

    with pytest.raises(UcpError, match=r"model\.wte names two values"):
        dcp_writer.write(checkpoint, MemoryStore(), "out", memory_bytes=MEMORY)
