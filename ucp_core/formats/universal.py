"""Plans the files of a universal checkpoint, down to the place of every byte. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from urllib.parse import quote

from ucp_core.formats.safetensors_header import print_header
from ucp_core.geometry import DTYPE_BYTES, StateMap, TensorEntry
from ucp_core.numerics import grouped

#: The default size of the Hugging Face tools.
FILE_BYTES_MAX = 5_000_000_000
INDEX_NAME = "model.safetensors.index.json"
#: The family of tensors that are not part of the model; no slot has this name.
OUTSIDE = "outside"
_SAFE_SLOT = re.compile(r"[A-Za-z0-9_]+")


class TargetTensor(NamedTuple):
    """One tensor of a file: its entry in the source, and its offset in the file."""

    entry: TensorEntry
    offset_bytes: int


class TargetFile(NamedTuple):
    """One safetensors file: its header, the tensors after it without gaps, its size."""

    name: str
    header: bytes
    tensors: tuple[TargetTensor, ...]
    num_bytes: int


def target_files(state_map: StateMap, roles: Mapping[str, str]) -> tuple[TargetFile, ...]:
    """Return a family of files for each slot of ``state_map``.

    Tensors that are not part of the model have a family of their own, because other tools load all
    weights.
    """
    by_family: dict[str, list[TensorEntry]] = {}
    for key, entry in sorted(state_map.entries.items()):
        is_outside = key.slot == "weight" and roles.get(key.fqn) == "extra"
        family = OUTSIDE if is_outside else _family(key.slot)
        by_family.setdefault(family, []).append(entry)
    files: list[TargetFile] = []
    for family, entries in sorted(by_family.items()):
        groups = list(grouped(entries, lambda entry: entry.num_bytes, FILE_BYTES_MAX))
        for number, group in enumerate(groups, start=1):
            # safetensors requires aligned tensors without gaps.
            group.sort(key=lambda entry: (-DTYPE_BYTES[entry.dtype], entry.key.fqn))
            name = f"{family}-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = [(entry.key.fqn, entry.dtype, entry.shape) for entry in group]
            header = print_header(tensors, {"format": "pt"})
            ends = list(accumulate((entry.num_bytes for entry in group), initial=len(header)))
            files.append(TargetFile(name, header, tuple(map(TargetTensor, group, ends)), ends[-1]))
    return tuple(files)


def small_files(files: Sequence[TargetFile], extra: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the JSON files of a universal checkpoint by name: index and extra values."""
    weights = [
        (tensor.entry, file.name)
        for file in files
        for tensor in file.tensors
        if tensor.entry.key.slot == "weight" and not file.name.startswith(f"{OUTSIDE}-")
    ]
    weights.sort(key=lambda weight: weight[0].key)
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entry, _ in weights)},
        "weight_map": {entry.key.fqn: name for entry, name in weights},
    }
    values = {INDEX_NAME: index} | {extra_file(name): extra[name] for name in sorted(extra)}
    return {
        name: json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
        for name, value in values.items()
    }


def extra_file(name: str) -> str:
    """Return the file of an extra value."""
    return f"extra/{_file_name(name)}.json"


def _family(slot: str) -> str:
    """Return the prefix of a slot's files; other tools expect ``model`` for weights."""
    if slot == "weight":
        return "model"
    if slot in ("model", OUTSIDE) or not _SAFE_SLOT.fullmatch(slot):
        return f"slot-{_file_name(slot)}"
    return slot


def _file_name(name: str) -> str:
    """Return ``name`` for a file name, with all but letters, digits and ``_-`` escaped."""
    if not name:
        return "%"
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
