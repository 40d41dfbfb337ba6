"""A folder of safetensors is read as it lies; whatever is wrong is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.training_states import adam_state
from ucp_core.conversion import convert
from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError
from ucp_core.formats import open_source
from ucp_core.formats.huggingface import reader as huggingface
from ucp_core.formats.huggingface.recognition import recognise
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore, MemoryStore

FOLDER = "model"
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _file(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _store(**files: bytes) -> MemoryStore:
    store = MemoryStore()
    for name, data in files.items():
        store.write_atomic(f"{FOLDER}/{name}", data, fsync=False)
    return store


def _folder(files: Mapping[str, bytes]) -> MemoryStore:
    return _store(**files)


def test_one_file_alone_is_a_model(tmp_path: Path) -> None:
    """Its neighbours do not count, whatever they are."""
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").write_bytes(b"rubbish")

    opened = huggingface.read(LocalStore(), str(tmp_path / "one.safetensors"))

    assert list(opened.state_map.entries) == [TensorKey("x", "weight")]
    with pytest.raises(CheckpointNotFoundError, match="three"):
        huggingface.read(LocalStore(), str(tmp_path / "three.safetensors"))


def test_small_documents_are_kept_and_every_other_file_has_a_policy() -> None:
    """A configuration that is lost makes the weights useless; silence about it hides the loss."""
    config = {"model_type": "llama", "tie_word_embeddings": True, "transformers_version": "5.0"}
    store = _folder(
        {
            "model.safetensors": _file({"model.embed_tokens.weight": TENSOR}, bytes(8)),
            "config.json": json.dumps(config).encode(),
            "tokenizer.model": b"x",
            "adapter.safetensors": b"x",
            "optimizer.pt": b"x",
            "trainer_state.json": b'{"loss": NaN}',
            "log.json": b'{"loss": 1e999}',
        }
    )

    opened = huggingface.read(store, FOLDER)

    assert opened.extra == {"huggingface": {"config.json": config}}
    assert {name: item.policy for name, item in opened.manifest.items.items()} == {
        "config.json": "replicate",
        "tokenizer.model": "drop",
        "adapter.safetensors": "drop",
        "optimizer.pt": "drop",
        "trainer_state.json": "drop",
        "log.json": "drop",
    }
    assert "training state in it is not read" in opened.manifest.items["optimizer.pt"].note
    assert "NaN" in opened.manifest.items["trainer_state.json"].note
    assert opened.manifest.source == {"format": "huggingface", "version": "5.0"}
    assert opened.manifest.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_folder_of_links_is_read_through_them(tmp_path: Path) -> None:
    """The hub's cache has the files elsewhere, under the names of their hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, tmp_path / "blobs" / "0f3a")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0f3a")

    opened = huggingface.read(LocalStore(), str(tmp_path / "snapshot"))

    assert opened.state_map.num_bytes == 12


def test_names_that_were_left_out_as_tied_come_back() -> None:
    """``safetensors.torch.save_model`` notes them in the file's free texts."""
    header = {"__metadata__": {"format": "pt", "head": "embed"}, "embed": TENSOR}

    opened = huggingface.read(_folder({"model.safetensors": _file(header, bytes(8))}), FOLDER)

    assert opened.manifest.ties == {"head": "embed"}


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_missing_shard_is_named(indexed: bool) -> None:  # noqa: FBT001 - a case of the test
    """Without it the rest would convert as if it were the whole model."""
    one = "model-00001-of-00002.safetensors"
    two = "model-00002-of-00002.safetensors"
    files = {one: _file({"a": TENSOR}, bytes(8))}
    if indexed:
        index = {"weight_map": {"a": one, "b": two}}
        files["model.safetensors.index.json"] = json.dumps(index).encode()

    with pytest.raises(CheckpointCorruptError, match=f"lacks {two}"):
        huggingface.read(_folder(files), FOLDER)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({}, "has no .safetensors file", id="empty"),
        pytest.param({"a": "x", "b": "y"}, "of several models", id="unrelated files"),
        pytest.param(
            {"model-00001-of-00002": "x", "model-00002-of-00002": "x"},
            "tensor 'x' is in .*00001.* and in .*00002",
            id="one name in two files",
        ),
    ],
)
def test_a_folder_that_is_not_one_model_is_refused(files: dict[str, str], message: str) -> None:
    """Merging unrelated files gives a model that was never trained."""
    store = _folder({f"{k}.safetensors": _file({n: TENSOR}, bytes(8)) for k, n in files.items()})

    with pytest.raises((CheckpointCorruptError, CheckpointNotFoundError), match=message):
        huggingface.read(store, FOLDER)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        pytest.param(b"[", "not JSON", id="no JSON"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        pytest.param(b"[]", "has no weight_map", id="a list"),
        pytest.param(b'{"weight_map": {"x": NaN}}', "not JSON", id="NaN"),
        pytest.param(b'{"weight_map": {}}', "has no weight_map", id="nothing"),
        pytest.param(b'{"weight_map": {"x": "../a.safetensors"}}', "'x'.*not the name", id="path"),
        pytest.param(b'{"weight_map": {"x": ".."}}', "'x'.*not the name", id="parent"),
        pytest.param(b'{"weight_map": {"x": 3}}', "'x'.*not the name", id="number"),
        pytest.param(
            b'{"weight_map": {"y": "model.safetensors"}}',
            "says that it holds tensor 'y', but it does not",
            id="another save",
        ),
    ],
)
def test_a_wrong_index_is_refused(index: bytes, message: str) -> None:
    """It comes from strangers and names files to open."""
    store = _folder(
        {
            "model.safetensors": _file({"x": TENSOR}, bytes(8)),
            "model.safetensors.index.json": index,
        }
    )

    with pytest.raises(CheckpointCorruptError, match=message):
        huggingface.read(store, FOLDER)


def _with(**changes: Any) -> dict[str, Any]:
    return {"x": TENSOR | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param(_with(dtype="F31"), "'x' has dtype 'F31'", id="dtype"),
        pytest.param(_with(dtype=["F32"]), "'x' has dtype", id="dtype is a list"),
        pytest.param(_with(shape=[3]), "has 8 bytes.*needs 12", id="size"),
        pytest.param(_with(dtype="F16"), "has 8 bytes.*needs 4", id="size of an element"),
        pytest.param(_with(shape=[-2]), "not a list of sizes", id="negative extent"),
        pytest.param(_with(shape=[2.0]), "not a list of sizes", id="fraction"),
        pytest.param(_with(shape=[True]), "not a list of sizes", id="truth"),
        pytest.param(_with(shape=[float("nan")]), "not a list of sizes", id="NaN"),
        pytest.param(_with(shape=[0, 10**30]), "not a list of sizes", id="gigantic extent"),
        pytest.param(_with(shape=[1] * 65), "not a list of sizes", id="too many dims"),
        pytest.param(_with(shape=[2**59] * 3), "needs", id="product"),
        pytest.param(_with(data_offsets=[-8, 0]), "not a start and a stop", id="negative"),
        pytest.param(_with(data_offsets=[0, 8, 8]), "not a start and a stop", id="three"),
        pytest.param(_with(data_offsets=[8, 0]), "is it cut short", id="turned round"),
        pytest.param(_with(shape=[4], data_offsets=[0, 16]), "is it cut short", id="outside"),
        pytest.param({"x": {"dtype": "F32"}}, "'x' is not described", id="incomplete"),
        pytest.param({"x": 3}, "'x' is not described", id="number"),
        pytest.param({"x": TENSOR, "y": TENSOR}, "'y' overlaps tensor 'x'", id="overlap"),
        pytest.param(
            {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "'x'.*gap", id="gap"
        ),
        pytest.param({}, "has 8 bytes of data, but its tensors have 0", id="left over"),
        pytest.param({"__metadata__": {"a": 1}}, "not an object of strings", id="metadata"),
        pytest.param(b'{"x": {}, "x": {}}', "'x' is there twice", id="duplicate"),
        pytest.param(b'{"x\\ud800": {}}', "name that is not text", id="half a character"),
        pytest.param(b'{"x": ' + b"9" * 5000 + b"}", "not JSON", id="gigantic number"),
        pytest.param(b'{"a":' * 100_000, "not JSON", id="deep"),
        pytest.param(b"[]", "not a JSON object", id="list"),
        pytest.param(b"{\xff}", "not JSON", id="no text"),
    ],
)
def test_a_wrong_header_is_refused_with_file_and_tensor(
    header: dict[str, Any] | bytes, message: str
) -> None:
    """Each of these would crash, read other bytes or lose a tensor if it were believed."""
    store = _folder({"model.safetensors": _file(header, bytes(8))})

    with pytest.raises(CheckpointCorruptError, match=message) as caught:
        huggingface.read(store, FOLDER)
    assert "model/model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "too few", id="empty"),
        pytest.param((2**63).to_bytes(8, "little"), "are allowed", id="gigantic header"),
        pytest.param((9).to_bytes(8, "little") + b"{}", "only 10", id="header cut short"),
    ],
)
def test_a_wrong_length_is_refused_before_memory_is_taken(data: bytes, message: str) -> None:
    """Eight bytes can ask for 2^63 of memory."""
    with pytest.raises(CheckpointCorruptError, match=message):
        huggingface.read(_folder({"model.safetensors": data}), FOLDER)


def test_a_header_longer_than_the_first_request_is_read_whole() -> None:
    """A model of experts has headers of some MiB."""
    header = {
        f"layers.{i}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(2000)
    }
    opened = huggingface.read(_folder({"model.safetensors": _file(header, bytes(2000))}), FOLDER)

    assert len(opened.state_map.entries) == 2000


def test_our_own_universal_checkpoint_is_not_taken_for_a_foreign_folder() -> None:
    """It is a safetensors folder too, but has checksums and moments that would be lost."""
    weights = {"model.safetensors": _file({"x": TENSOR}, bytes(8))}

    assert recognise(_folder(weights), FOLDER)
    assert not recognise(_folder(weights | {"manifest.json": b"{}"}), FOLDER)
    assert not recognise(_folder({"latest": b"x"}), FOLDER)


def test_a_universal_checkpoint_without_its_manifest_is_weights_and_a_note(tmp_path: Path) -> None:
    """Without the note the moments beside the weights would be lost without a word."""
    state = adam_state({"a.w": (4, 2), "b.w": (5,)})
    state.save(LocalStore(), str(tmp_path / "run"))
    source = open_source(LocalStore(), str(tmp_path / "run"))
    out = tmp_path / "out"
    convert(source, LocalStore(), str(out), memory_bytes=64 << 20)
    (out / "manifest.json").unlink()

    found = open_source(LocalStore(), str(out))
    assert {key.fqn for key in found.state_map.entries} == {"a.w", "b.w"}
    assert found.manifest.items["exp_avg-00001-of-00001.safetensors"].policy == "drop"
