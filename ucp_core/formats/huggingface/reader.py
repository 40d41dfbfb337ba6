"""Reads a Hugging Face folder of safetensors, or one such file; weights only, nothing is copied.

The format has no checksums. As in transformers, the model is in the files of the index, or in
``model.safetensors``, or in the only family of files; without these in ``pytorch_model.bin`` or the
files of its index.
"""

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError
from ucp_core.formats.huggingface.recognition import (
    INDEX_SUFFIX,
    NAME,
    SUFFIX,
    TORCH_INDEX,
    TORCH_NAME,
    is_torch_file,
)
from ucp_core.formats.refusals import corrupt, missing
from ucp_core.formats.safetensors_header import Header, read_header
from ucp_core.formats.shared import Assembly, Files, in_parallel, whole_tensor
from ucp_core.geometry import Box, Fragment, TensorEntry, TensorKey
from ucp_core.language import Rules
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join
from ucp_core.torch_files import TensorRef

#: Name of the folder's small documents in ``extra``; the writer puts them beside the weights.
EXTRA_NAME = "huggingface"

_FILE_NAME = re.compile(r"[^/\\\x00-\x1f]+")
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_INDEX_BYTES_MAX = 100_000_000
#: A model's configuration is a few KiB, its tokenizer some MiB.
_DOCUMENT_BYTES_MAX = 64 << 10
_PICKLES = (".pt", ".pth", ".bin", ".pkl")
_PICKLE_NOTE = "a pickle beside the weights; training state in it is not read"
_FILE_NOTE = "it holds no tensors of the model; copy it if you need it"
#: Names of the input embedding in the families whose output embedding is tied to it.
_INPUT_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
_OUTPUT_EMBEDDING = "lm_head.weight"


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open the folder, or the file if ``directory`` is one: ``.safetensors``, ``.bin``, ``.pt``.

    See ``open_source`` for arguments and errors. ``rules`` are ignored: every tensor is whole.
    ``tag`` must be None: a folder holds one model.
    """
    del rules
    if tag is not None:
        raise CheckpointNotFoundError(
            f"{directory} is a model of Hugging Face, which has no tags: open it without the tag "
            f"{tag!r}",
            path=directory,
        )
    listed: Mapping[str, str] = {}
    if directory.endswith(SUFFIX) or is_torch_file(store, directory):
        path = directory
        directory, _, name = path.rpartition("/")
        if not store.exists(path):
            raise CheckpointNotFoundError(f"{path} is not there", path=path)
        files, sizes = [name], {name: store.size(path)}
    else:
        sizes = store.sizes(directory)
        files, listed = _files(store, directory, sizes)
    if lacking := [file for file in files if file not in sizes]:
        raise missing(directory, lacking)
    found = Assembly(store, directory)
    documents = _documents(found, sizes, files)
    config = documents.get("config.json", {})
    if documents:
        found.extra[EXTRA_NAME] = documents
    if files[0].endswith(SUFFIX):
        metadata = _add_safetensors(found, files, sizes)
    else:
        _add_torch_files(found, files, listed)
        metadata = found.ties
    _check_index(found, listed)
    found.ties |= _ties(found.entries, metadata, config)
    version = str(config.get("transformers_version", ""))
    return found.checkpoint({"format": NAME, "version": version})


def _files(
    store: Store, directory: str, sizes: Mapping[str, int]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the files that hold the model, and the index's map of tensor to file."""
    indices = sorted(name for name in sizes if name.endswith(INDEX_SUFFIX))
    if len(indices) > 1 and f"model{INDEX_SUFFIX}" in indices:
        indices = [f"model{INDEX_SUFFIX}"]
    if len(indices) > 1:
        raise corrupt(
            directory,
            f"it has several indices, {', '.join(indices)}: give one of the files or "
            "remove all but one",
        )
    names = sorted(name for name in sizes if name.endswith(SUFFIX))
    if not indices and not names and TORCH_INDEX in sizes:
        indices = [TORCH_INDEX]
    if indices:
        weight_map = _weight_map(store, join(directory, indices[0]), sizes[indices[0]])
        return sorted(set(weight_map.values())), weight_map
    if not names and TORCH_NAME in sizes:
        return [TORCH_NAME], {}
    if f"model{SUFFIX}" in names:
        return [f"model{SUFFIX}"], {}
    return _family(directory, names), {}


def _family(directory: str, names: Sequence[str]) -> list[str]:
    """Return the files of a folder without an index, if they form exactly one model."""
    if not names:
        raise CheckpointNotFoundError(f"{directory} has no {SUFFIX} file", path=directory)
    if len(names) == 1 and not _NUMBERED.fullmatch(names[0]):
        return list(names)
    found = {(match[1], match[3]) for match in map(_NUMBERED.fullmatch, names) if match}
    if len(found) != 1 or not all(map(_NUMBERED.fullmatch, names)):
        raise corrupt(
            directory,
            f"it has {len(names)} {SUFFIX} files of several models and no index, such as "
            f"{names[0]} and {names[-1]}: give one file",
        )
    stem, digits = found.pop()
    count = int(digits)
    if count > len(names):
        family = (f"{stem}-{n:0{len(digits)}d}-of-{digits}{SUFFIX}" for n in range(1, count + 1))
        raise missing(directory, (name for name in family if name not in names))
    return list(names)


def _weight_map(store: Store, path: str, size_bytes: int) -> dict[str, str]:
    if size_bytes > _INDEX_BYTES_MAX:
        raise corrupt(path, f"it has {size_bytes} bytes, an index has at most {_INDEX_BYTES_MAX}")
    document = _json(store.read(path), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(path, "it has no weight_map")
    for name, file in weight_map.items():
        # A path could lead out of the folder.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file) or file in {".", ".."}:
            raise corrupt(
                path,
                f"tensor {name!r} should be in {file!r}, which is not the name of a "
                "file of this folder",
            )
    return weight_map


def _json(data: bytes, path: str) -> Any:
    try:
        return json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"it is not JSON: {error}") from error


def _finite(text: str) -> float:
    # Python reads and writes NaN, which is not JSON.
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _add_safetensors(
    found: Assembly, files: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, str]:
    """Add the tensors of all files; return the metadata of the headers."""
    entries = found.entries
    metadata: dict[str, str] = {}

    def header(file: str) -> tuple[Header, int]:
        return read_header(found.store, join(found.directory, file), sizes[file])

    # Each header costs a round trip.
    headers = in_parallel(header, files)
    for file, (held, data_byte) in zip(files, headers, strict=True):
        metadata.update(held.metadata)
        for name, dtype, shape, start, stop in held.tensors:
            key = TensorKey(name, "weight")
            if key in entries:
                raise corrupt(
                    found.directory,
                    f"tensor {name!r} is in {entries[key].fragments[0].file} and in {file}: two "
                    "models in one folder, or a file of an older save; remove the wrong one",
                )
            place = Box.full(shape), file, data_byte + start, stop - start
            fragments = (Fragment(*place, None, ()),)
            entries[key] = TensorEntry(key=key, dtype=dtype, shape=shape, fragments=fragments)
    return metadata


def _add_torch_files(found: Assembly, names: Sequence[str], listed: Mapping[str, str]) -> None:
    """Add the tensors of torch's files, and their ties; ``listed`` has the index's file by tensor.

    Tensors that share their bytes are tied.
    """
    files = Files(found.store, found.directory)
    files.open(names)
    entries, ties = found.entries, found.ties
    for name in names:
        path = files.path(name)
        owners: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
        for fqn, ref in files.trees[name].items():
            if not isinstance(fqn, str) or not isinstance(ref, TensorRef):
                raise corrupt(
                    path,
                    f"{fqn!r} is not a tensor, so the file is not a dict of weights by "
                    "name; if it belongs to a checkpoint, give the checkpoint's folder",
                )
            if listed.get(fqn, name) != name or TensorKey(fqn, "weight") in entries:
                raise corrupt(
                    path,
                    f"it holds {fqn}, which {listed.get(fqn, 'another file')} holds too: "
                    "files of two models are mixed",
                )
            place = ref.offset_bytes, ref.shape, ref.strides
            owner = owners.setdefault(place, fqn) if ref.num_bytes else fqn
            if owner != fqn:
                ties[fqn] = owner
                continue
            key = TensorKey(fqn, "weight")
            entries[key] = whole_tensor(key, ref)
    found.extents |= files.extents


def _check_index(found: Assembly, listed: Mapping[str, str]) -> None:
    """Raise an error unless each file holds the tensors that the index has there."""
    for name, file in sorted(listed.items()):
        held = found.entries.get(TensorKey(found.ties.get(name, name), "weight"))
        if held is None or any(fragment.file != file for fragment in held.fragments):
            raise corrupt(
                join(found.directory, file),
                f"the index says that it holds tensor {name!r}, but "
                "it does not; the file is from another save",
            )


def _ties(
    entries: Mapping[TensorKey, TensorEntry], metadata: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, str]:
    """Return aliases that the writer left out because they are tied.

    ``safetensors.torch.save_model`` notes them in the file, and transformers in the configuration.
    """
    names = {key.fqn for key in entries}
    ties = {
        alias: owner for alias, owner in metadata.items() if owner in names and alias not in names
    }
    if config.get("tie_word_embeddings") is True and _OUTPUT_EMBEDDING not in names | ties.keys():
        owner = next((name for name in _INPUT_EMBEDDINGS if name in names), None)
        if owner is not None:
            ties[_OUTPUT_EMBEDDING] = owner
    return ties


def _documents(found: Assembly, sizes: Mapping[str, int], files: Sequence[str]) -> dict[str, Any]:
    """Return the small JSON documents of the folder, and note the fate of every other file."""
    documents: dict[str, Any] = {}
    items = found.items
    for name, size_bytes in sorted(sizes.items()):
        if name in files or name.endswith((INDEX_SUFFIX, TORCH_INDEX)):
            continue
        if name.endswith(SUFFIX):
            items[name] = Item("drop", "tensors that do not belong to the model")
            continue
        if name.endswith(".json") and size_bytes <= _DOCUMENT_BYTES_MAX:
            try:
                document = _json(found.store.read(join(found.directory, name)), name)
            except CheckpointCorruptError as error:
                # Logs of a training run can hold NaN, which does not affect the weights.
                items[name] = Item("drop", str(error))
                continue
            if isinstance(document, dict):
                documents[name] = document
                items[name] = Item("replicate", f"kept in extra {EXTRA_NAME!r}")
                continue
        items[name] = Item("drop", _PICKLE_NOTE if name.endswith(_PICKLES) else _FILE_NOTE)
    return documents
