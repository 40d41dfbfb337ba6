"""Recognises DeepSpeed's checkpoints and their files by name.

Sources: ``runtime/engine.py`` (``_get_ckpt_name`` and its like) and ``runtime/pipe/module.py`` of
DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucp_core.storage import Store

NAME = "deepspeed"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
#: The folder of parameters in a universal checkpoint.
ZERO = "zero"

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_ZERO3 = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
# The underscore before ``optim`` came with DeepSpeed 0.3.
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ANY = (_MODEL, _MODEL_ZERO3, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM)

_TAG = re.compile(r"[^/\\\x00-\x1f]+")
_LATEST_BYTES_MAX = 4096
_SUFFIXES = (".pt", ".py", ".txt", ".json", ".bin", ".safetensors", ".distcp", ".metadata", ".md")
#: Looking into a folder costs a request, and a folder of tags has few entries.
_FOLDERS_MAX = 64


@dataclass(slots=True)
class Names:
    """The files of a native checkpoint, sorted by content and rank."""

    #: Model files of ZeRO stages 0 to 2, by model-parallel rank.
    model: dict[int, str] = field(default_factory=dict)
    model_zero3: dict[tuple[int, int], str] = field(default_factory=dict)  #: By ``(dp, mp)``.
    #: ZeRO's files by prefix (``bf16_``, ``fp16_`` or none), then by ``(dp, mp)``.
    optim: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)
    #: Layer files of a pipeline by ``(layer, tp)``; tp is None if the name has none.
    layers: dict[tuple[int, int | None], str] = field(default_factory=dict)
    #: Files of experts by ``(moe layer, expert, mp)``; the layer is -1 in old names.
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    #: Optimizer files of experts without ZeRO, by ``(ep, mp)``.
    expert_optim: dict[tuple[int, int], str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint that was found: its path in the store, its tag, and whether it is universal."""

    directory: str
    tag: str
    universal: bool


def sort_names(names: Iterable[str]) -> Names:
    """Sort the files of a checkpoint's folder."""
    found = Names()
    for name in names:
        if match := _MODEL.fullmatch(name):
            found.model[int(match[1])] = name
        elif match := _MODEL_ZERO3.fullmatch(name):
            found.model_zero3[int(match[2]), int(match[3])] = name
        elif match := _OPTIM.fullmatch(name):
            found.optim.setdefault(match[1] or "", {})[int(match[2]), int(match[3])] = name
        elif match := _LAYER.fullmatch(name):
            found.layers[int(match[1]), None if match[2] is None else int(match[2])] = name
        elif match := _EXPERT.fullmatch(name):
            found.experts[int(match[1] or -1), int(match[2]), int(match[3])] = name
        elif match := _EXPERT_OPTIM.fullmatch(name):
            found.expert_optim[int(match[1]), int(match[2])] = name
        else:
            found.others.append(name)
    return found


def is_checkpoint(store: Store, directory: str) -> bool:
    """Return whether ``directory`` itself is a checkpoint of DeepSpeed."""
    names = store.list(directory)
    return _is_native(names) or _is_universal(store, directory, names)


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a checkpoint of DeepSpeed, or holds some under tags."""
    names = store.list(directory)
    if _is_native(names) or _is_universal(store, directory, names):
        return True
    if LATEST in names or LATEST_UNIVERSAL in names:
        return True
    return any(is_checkpoint(store, join(directory, name)) for name in _folders(names))


def locate(store: Store, directory: str, tag: str | None) -> Folder:
    """Return the checkpoint in ``directory``, or the latest one below it.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or there are several and nothing selects
            one.
        CheckpointCorruptError: The file ``latest`` does not hold a name.
    """
    names = store.list(directory)
    if tag is not None:
        return _tagged(store, directory, names, _checked_tag(tag, "the tag"), "the tag was given")
    if _is_universal(store, directory, names):
        return Folder(directory, directory.rsplit("/", 1)[-1], universal=True)
    if _is_native(names):
        return Folder(directory, directory.rsplit("/", 1)[-1], universal=False)
    for latest in (LATEST, LATEST_UNIVERSAL):
        if latest in names:
            found = _latest(store, join(directory, latest))
            return _tagged(store, directory, names, found, f"{latest} names it")
    return _only(store, directory, names)


def _only(store: Store, directory: str, names: Iterable[str]) -> Folder:
    """Return the only checkpoint of a folder that has no ``latest``."""
    found = [name for name in _folders(names) if is_checkpoint(store, join(directory, name))]
    if len(found) > 1:
        raise CheckpointNotFoundError(
            f"{directory} holds {len(found)} checkpoints ({', '.join(found[:4])}) and no file "
            f"named {LATEST}: choose one with --tag",
            path=directory,
            tags=tuple(found),
        )
    if not found:
        raise CheckpointNotFoundError(
            f"{directory} holds no checkpoint of DeepSpeed: neither its files nor {LATEST}",
            path=directory,
        )
    return _tagged(store, directory, names, found[0], "it is the only one")


def _tagged(store: Store, directory: str, names: Iterable[str], tag: str, why: str) -> Folder:
    path = join(directory, tag)
    inside = store.list(path)
    if _is_universal(store, path, inside):
        return Folder(path, tag, universal=True)
    if _is_native(inside):
        return Folder(path, tag, universal=False)
    known = [name for name in _folders(names) if is_checkpoint(store, join(directory, name))]
    raise CheckpointNotFoundError(
        f"{path} is not a checkpoint of DeepSpeed, but {why}; in {directory} there are: "
        f"{', '.join(known[:8]) or 'none'}; choose one with --tag",
        path=path,
        tags=tuple(known),
    )


def _latest(store: Store, path: str) -> str:
    size_bytes = store.size(path)
    if size_bytes > _LATEST_BYTES_MAX:
        raise CheckpointCorruptError(
            f"{path} has {size_bytes} bytes, but should hold the name of a folder", path=path
        )
    return _checked_tag(store.read(path).decode("utf-8", "replace").strip(), path)


def _checked_tag(tag: str, where: str) -> str:
    """Return a tag after checks: it may name nested folders, but must not leave the directory."""
    parts = tag.split("/")
    if not all(map(_TAG.fullmatch, parts)) or not {".", ".."}.isdisjoint(parts):
        raise CheckpointCorruptError(
            f"{where} is {tag[:80]!r}, but should be the name of a folder", path=where
        )
    return tag


def _folders(names: Iterable[str]) -> list[str]:
    """Return the names that can be folders: listings do not distinguish files and folders."""
    return [name for name in names if not name.endswith(_SUFFIXES)][:_FOLDERS_MAX]


def _is_native(names: Iterable[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names for pattern in _ANY) and ZERO not in names


def _is_universal(store: Store, directory: str, names: Iterable[str]) -> bool:
    if ZERO not in names or any(_OPTIM.fullmatch(name) for name in names):
        return False
    inner = store.list(join(directory, ZERO))
    if "optimizer_state.pt" in inner:
        return True
    return any("fp32.pt" in store.list(join(directory, ZERO, name)) for name in inner[:4])
