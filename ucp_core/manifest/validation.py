"""Reads a document's JSON and finds all its problems, each with its path. Pure."""

from __future__ import annotations

import json
import re
import reprlib
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import Problem
from ucp_core.geometry import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

#: The values of ``format``.
FORMATS = ("everstep-universal", "everstep-distributed", "everstep-rank-record")
#: More elements or bytes than any tensor or file has. Larger numbers come from damage or malice.
_INT_MAX = 1 << 60
_NDIM_MAX = 32
CRC_MAX = (1 << 32) - 1
_FILE_NAME = re.compile(r"(?:extra/)?[A-Za-z0-9_%][A-Za-z0-9_.%-]*")
_FILE_NAME_MAX = 240
#: Roles of tensors that are not trained parameters.
ROLES = ("frozen", "buffer", "extra")
#: Policies for an item of a foreign checkpoint.
POLICIES = ("reshard", "replicate", "reseed", "drop")
#: A damaged document can be nested deeper than ``repr`` can follow.
_QUOTE = reprlib.Repr()
_QUOTE.maxlevel = 3
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = 60


def _refuse_constant(name: str) -> Any:
    """Refuse NaN and infinities, which Python accepts."""
    raise ValueError(f"{name} is not a JSON number")


def load_json(data: bytes, *, constant: Callable[[str], Any] = _refuse_constant) -> Any:
    """Return the value of a JSON text.

    Args:
        data: The text in UTF-8.
        constant: Returns the values of ``NaN`` and infinities; by default they are refused.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(data, object_pairs_hook=_object, parse_constant=constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return one JSON object; two members of one name are refused."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, _ in pairs:
            if found.pop(name, found) is found:
                raise ValueError(f"the name {name[:80]!a} is there twice in one object")
    return found


def validate(document: Any) -> list[Problem]:
    """Return every problem of a manifest or rank record; none if it can be parsed.

    Unknown keys are allowed: later writers of the same version may add some.
    """
    checker = _Checker()
    checker.document(document)
    return checker.problems


def validate_tensors(tensors: dict[str, Any]) -> list[Problem]:
    """Return every problem of a native document's tensors, without their fragments."""
    checker = _Checker()
    checker.tensors(tensors, is_whole=False)
    return checker.problems


class _Checker:
    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._block_bytes = 0
        self._files: dict[str, int] = {}

    def _add(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def _integer(self, value: Any, path: str, low: int = 0, high: int = _INT_MAX) -> bool:
        # For Python, ``True`` is an int.
        if type(value) is int and low <= value <= high:
            return True
        self._add(path, f"must be an integer from {low} to {high}, is {_short(value)}")
        return False

    def _mapping(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self._add(path, f"must be an object, is {_short(value)}")
        return {}

    def _list(self, value: Any, path: str) -> list[Any]:
        if isinstance(value, list):
            return value
        self._add(path, f"must be a list, is {_short(value)}")
        return []

    def document(self, document: Any) -> None:
        if not isinstance(document, dict):
            self._add("$", f"must be an object, is {_short(document)}")
            return
        kind = document.get("format")
        if kind not in FORMATS:
            self._add("format", f"must be one of {', '.join(FORMATS)}, is {_short(kind)}")
        if document.get("version") != 1:
            self._add("version", f"must be 1, is {_short(document.get('version'))}")
        self._integer(document.get("step"), "step")
        self._integer(document.get("attempt"), "attempt")
        if self._integer(document.get("block_bytes"), "block_bytes", low=1):
            self._block_bytes = document["block_bytes"]
        if kind in FORMATS[1:]:
            self._integer(document.get("world_size"), "world_size", low=1)
        if kind == FORMATS[2]:
            self._integer(document.get("rank"), "rank")
        self._mapping(document.get("source"), "source")
        self._groups(document.get("param_groups"))
        self._file_table(document.get("files"))
        self._extra(document.get("extra"), is_files=kind == FORMATS[0])
        tensors = self._mapping(document.get("tensors"), "tensors")
        self.tensors(tensors, is_whole=kind == FORMATS[0])
        self._items(document.get("items", {}))

    def tensors(self, tensors: dict[str, Any], *, is_whole: bool) -> None:
        for fqn, tensor in tensors.items():
            self._name(fqn, f"tensors.{_shown(fqn)}")
            self._tensor(tensor, f"tensors.{_shown(fqn)}", is_whole=is_whole)
        self._ties(tensors)

    def _name(self, name: str, path: str) -> None:
        # A lone surrogate cannot be printed, and cannot be a key of a safetensors file.
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            self._add(path, "is not a name: it cannot be written as UTF-8")

    def _ties(self, tensors: dict[str, Any]) -> None:
        """Check that every alias belongs to one tensor and has no entry of its own."""
        owners: dict[str, str] = {}
        for fqn, tensor in tensors.items():
            if not isinstance(tensor, dict):
                continue
            path = f"tensors.{_shown(fqn)}"
            if tensor.get("role", ROLES[0]) not in ROLES:
                role = _short(tensor["role"])
                self._add(f"{path}.role", f"must be one of {', '.join(ROLES)}, is {role}")
            for place, alias in enumerate(self._list(tensor.get("ties", []), f"{path}.ties")):
                here = f"{path}.ties[{place}]"
                if not isinstance(alias, str):
                    self._add(here, f"must be a name, is {_short(alias)}")
                elif alias in tensors:
                    self._add(here, f"{_short(alias)} has an entry of its own")
                elif alias in owners:
                    self._add(here, f"{_short(alias)} is tied to {_short(owners[alias])} already")
                else:
                    self._name(alias, here)
                    owners[alias] = fqn

    def _items(self, items: Any) -> None:
        for name, value in self._mapping(items, "items").items():
            path = f"items.{_shown(name)}"
            fields = self._mapping(value, path)
            if fields.get("policy") not in POLICIES:
                policy = _short(fields.get("policy"))
                self._add(f"{path}.policy", f"must be one of {', '.join(POLICIES)}, is {policy}")
            if not isinstance(fields.get("note", ""), str):
                self._add(f"{path}.note", f"must be text, is {_short(fields['note'])}")

    def _groups(self, groups: Any) -> None:
        for index, group in enumerate(self._list(groups, "param_groups")):
            path = f"param_groups[{index}]"
            params = self._mapping(group, path).get("params", [])
            for place, fqn in enumerate(self._list(params, f"{path}.params")):
                if not isinstance(fqn, str):
                    self._add(f"{path}.params[{place}]", f"must be a name, is {_short(fqn)}")

    def _file_table(self, files: Any) -> None:
        for name, value in self._mapping(files, "files").items():
            path = f"files.{_shown(name)}"
            if not _FILE_NAME.fullmatch(name) or len(name) > _FILE_NAME_MAX:
                self._add(path, "must be a plain file name in the checkpoint's own directory")
            entry = self._mapping(value, path)
            if self._integer(entry.get("nbytes"), f"{path}.nbytes"):
                self._files[name] = entry["nbytes"]
            self._integer(entry.get("crc32"), f"{path}.crc32", high=CRC_MAX)

    def _extra(self, extra: Any, *, is_files: bool) -> None:
        for name, value in self._mapping(extra, "extra").items():
            if is_files and (not isinstance(value, str) or value not in self._files):
                self._add(f"extra.{_shown(name)}", f"must be a name in files, is {_short(value)}")

    def _tensor(self, tensor: Any, path: str, *, is_whole: bool) -> None:
        fields = self._mapping(tensor, path)
        shape = self._shape(fields.get("shape"), f"{path}.shape")
        self._pattern(fields.get("pattern"), f"{path}.pattern")
        for slot, value in self._mapping(fields.get("slots"), f"{path}.slots").items():
            here = f"{path}.slots.{_shown(slot)}"
            self._name(slot, here)
            entry = self._mapping(value, here)
            own = self._shape(entry["shape"], f"{here}.shape") if "shape" in entry else shape
            self._pattern(entry.get("pattern"), f"{here}.pattern")
            dtype = entry.get("dtype")
            itemsize = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
            if itemsize is None:
                known = ", ".join(DTYPE_BYTES)
                self._add(f"{here}.dtype", f"must be one of {known}, is {_short(dtype)}")
            if is_whole:
                full = None if own is None else prod(own)
                self._location(entry, here, full, itemsize)
                continue
            fragments = self._list(entry.get("fragments"), f"{here}.fragments")
            for index, item in enumerate(fragments):
                self._fragment(item, f"{here}.fragments[{index}]", own, itemsize)

    def _pattern(self, pattern: Any, path: str) -> None:
        # Later versions of the rule language may have other words.
        is_word = isinstance(pattern, str)
        if not (pattern is None or is_word or (isinstance(pattern, dict) and len(pattern) == 1)):
            self._add(path, f"must be a word, or an object of one, is {_short(pattern)}")

    def _shape(self, shape: Any, path: str) -> list[int] | None:
        if not isinstance(shape, list) or len(shape) > _NDIM_MAX:
            self._add(path, f"must be a list of at most {_NDIM_MAX} extents, is {_short(shape)}")
            return None
        ok = [self._integer(extent, f"{path}[{d}]") for d, extent in enumerate(shape)]
        if all(ok) and prod(shape) > _INT_MAX:
            self._add(path, f"has {prod(shape)} elements, which no file can hold")
            return None
        return shape if all(ok) else None

    def _fragment(
        self, item: Any, path: str, shape: list[int] | None, itemsize: int | None
    ) -> None:
        fragment = self._mapping(item, path)
        box: Any = fragment.get("box")
        num_elements: int | None = None
        if shape is not None:
            if _is_box(box, shape):
                num_elements = prod([b - a for a, b in box])
            else:
                self._add(
                    f"{path}.box",
                    f"must be [start, stop] for every dim of shape {shape}, is {_short(box)}",
                )
        if "strides" in fragment:
            self._add(f"{path}.strides", "are reserved; fragments of version 1 are contiguous")
        if not isinstance(fragment.get("replica", False), bool):
            self._add(f"{path}.replica", "must be true or false")
        self._location(fragment, path, num_elements, itemsize)

    def _location(
        self, entry: dict[str, Any], path: str, num_elements: int | None, itemsize: int | None
    ) -> None:
        """Check that the bytes lie in a known file, and that their number fits the box."""
        ok_offset = self._integer(entry.get("offset"), f"{path}.offset")
        ok_bytes = self._integer(entry.get("nbytes"), f"{path}.nbytes")
        self._integer(entry.get("crc32"), f"{path}.crc32", high=CRC_MAX)
        name = entry.get("file")
        size = self._files.get(name) if isinstance(name, str) else None
        if size is None:
            self._add(f"{path}.file", f"must be a name in files, is {_short(name)}")
        elif ok_offset and ok_bytes and entry["offset"] + entry["nbytes"] > size:
            end = entry["offset"] + entry["nbytes"]
            self._add(path, f"ends at byte {end} of {name}, which has {size}")
        if not ok_bytes:
            return
        if num_elements is not None and itemsize is not None:
            expected = num_elements * itemsize
            if entry["nbytes"] != expected:
                self._add(f"{path}.nbytes", f"must be {expected}, is {entry['nbytes']}")
        if self._block_bytes:
            self._blocks(entry, path, -(-entry["nbytes"] // self._block_bytes))

    def _blocks(self, entry: dict[str, Any], path: str, num_blocks: int) -> None:
        blocks = entry.get("blocks")
        if blocks is None and num_blocks <= 1:
            return
        if not isinstance(blocks, list) or len(blocks) != max(1, num_blocks):
            self._add(f"{path}.blocks", f"must list the crc32 of {num_blocks} blocks")
            return
        for index, value in enumerate(blocks):
            if type(value) is not int or not 0 <= value <= CRC_MAX:
                self._add(f"{path}.blocks[{index}]", f"must be a crc32, is {_short(value)}")


def _is_box(box: Any, shape: list[int]) -> bool:
    if not isinstance(box, list) or len(box) != len(shape):
        return False
    for bounds, extent in zip(box, shape, strict=True):
        if not isinstance(bounds, list) or len(bounds) != 2:  # noqa: PLR2004
            return False
        low, high = bounds
        if type(low) is not int or type(high) is not int or not 0 <= low <= high <= extent:
            return False
    return True


def _short(value: Any) -> str:
    text = _QUOTE.repr(value)
    return _shown(text) if len(text) <= 60 else f"{_shown(text[:57])}..."  # noqa: PLR2004


def _shown(name: str) -> str:
    """Return a printable form of ``name``: damage makes half characters and very long names."""
    if len(name) > _FILE_NAME_MAX:
        name = f"{name[:_FILE_NAME_MAX]}..."
    return name.encode("utf-8", "backslashreplace").decode()
