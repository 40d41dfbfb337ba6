"""Recognises DeepSpeed's checkpoints and their files by name.

Sources: ``runtime/engine.py`` (``_get_ckpt_name`` and its like) and ``runtime/pipe/module.py`` of
DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointNotFoundError
from ucp_core.formats.refusals import corrupt
from ucp_core.storage import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucp_core.storage import Store

NAME = "deepspeed"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
#: The folder of parameters in a universal checkpoint.
ZERO = "zero"

#: The files of a native checkpoint by kind; the groups number layers, experts and ranks.
_FILES = {
    "model": re.compile(r"mp_rank_(\d+)_model_states\.pt"),
    "model_zero3": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt"),
    # The underscore before ``optim`` came with DeepSpeed 0.3.
    "optim": re.compile(r"(bf16_|fp16_|)zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt"),
    "layer": re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt"),
    "expert": re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt"),
    "expert_optim": re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"),
}

_TAG = re.compile(r"[^/\\\x00-\x1f]+")
_LATEST_BYTES_MAX = 4096
_SUFFIXES = (".pt", ".py", ".txt", ".json", ".bin", ".safetensors", ".distcp", ".metadata", ".md")
#: Looking into a folder costs a request, and a folder of tags has few entries.
_FOLDERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint that was found: its path in the store, its tag, and whether it is universal."""

    directory: str
    tag: str
    universal: bool


def sort_names(names: Iterable[str]) -> dict[str, dict[tuple[Any, ...], str]]:
    """Return the files of a folder by kind and numbers; a number that a name lacks is -1.

    Kinds are ``model`` (of ZeRO stages 0 to 2), ``model_zero3``, ``optim`` (the first number is the
    prefix), ``layer``, ``expert``, ``expert_optim``, and ``other`` with the name itself.
    """
    found: dict[str, dict[tuple[Any, ...], str]] = {kind: {} for kind in (*_FILES, "other")}
    for name in names:
        matches = ((kind, pattern.fullmatch(name)) for kind, pattern in _FILES.items())
        kind, match = next(((k, match) for k, match in matches if match), ("other", None))
        groups = [name] if match is None else match.groups("-1")
        key = (int(g) if g.removeprefix("-").isdecimal() else g for g in groups)
        found[kind][tuple(key)] = name
    return found


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a checkpoint of DeepSpeed, or holds some under tags."""
    names = store.list(directory)
    if _opened(store, directory, names) or LATEST in names or LATEST_UNIVERSAL in names:
        return True
    return any(_tags(store, directory, names))


def locate(store: Store, directory: str, tag: str | None) -> Folder:
    """Return the checkpoint in ``directory``, or the latest one below it.

    ``CheckpointNotFoundError``: there is none, or there are several and nothing selects one.
    """
    names, why = store.list(directory), "the tag was given"
    if tag is None and (found := _opened(store, directory, names)):
        return found
    latest = next((name for name in (LATEST, LATEST_UNIVERSAL) if name in names), None)
    if tag is None and latest is not None:
        path, why = join(directory, latest), f"{latest} names it"
        text = store.read(path) if store.size(path) <= _LATEST_BYTES_MAX else b""
        tag = text.decode("utf-8", "replace").strip()
    known = [] if tag is not None else list(_tags(store, directory, names))
    if len(known) == 1:
        tag = known[0]
    if tag is not None:
        path = join(directory, _checked(tag, f"{directory}: {why}"))
        if found := _opened(store, path, store.list(path)):
            return Folder(path, tag, universal=found.universal)
        what = f"{path} is not a checkpoint of DeepSpeed, but {why}"
    else:
        what = f"{directory} has several checkpoints, or none, and no file named {LATEST}"
    known = known or list(_tags(store, directory, names))
    raise CheckpointNotFoundError(
        f"{what}; there are: {', '.join(known[:8]) or 'none'}; choose one with --tag",
        path=directory,
    )


def _checked(tag: str, where: str) -> str:
    """Return a tag after checks: it may name nested folders, but must not leave the directory."""
    parts = tag.split("/")
    if not all(map(_TAG.fullmatch, parts)) or not {".", ".."}.isdisjoint(parts):
        raise corrupt(where, f"{tag[:80]!r} should be the name of a folder")
    return tag


def _tags(store: Store, directory: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the folders that are checkpoints; listings do not distinguish files and folders."""
    for name in [name for name in names if not name.endswith(_SUFFIXES)][:_FOLDERS_MAX]:
        path = join(directory, name)
        if _opened(store, path, store.list(path)):
            yield name


def _opened(store: Store, directory: str, names: Iterable[str]) -> Folder | None:
    """Return the checkpoint that ``directory`` itself is."""
    tag = directory.rsplit("/", 1)[-1]
    kinds = {kind for kind, files in sort_names(names).items() if files}
    if ZERO not in names:
        return Folder(directory, tag, universal=False) if kinds - {"other"} else None
    if "optim" in kinds:
        return None
    inner = store.list(join(directory, ZERO))
    if "optimizer_state.pt" in inner or any(
        "fp32.pt" in store.list(join(directory, ZERO, name)) for name in inner[:4]
    ):
        return Folder(directory, tag, universal=True)
    return None
