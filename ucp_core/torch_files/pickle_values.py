"""Converts values of a pickle to JSON: the small ones that are kept beside tensors. Pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import ForeignClassError
from ucp_core.torch_files.pickle_arrays import NumpyArray
from ucp_core.torch_files.pickle_classes import Global, Opaque
from ucp_core.torch_files.pickle_tensors import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable


#: Bytes of texts and binary values; a text that repeats counts each time.
_TEXT_BYTES_MAX = 64 << 20
_DEPTH_MAX = 100


def as_json(
    value: Any,
    *,
    tensor: Callable[[TensorRef], Any] | None = None,
    nodes_max: int = 1 << 20,
) -> Any:
    """Return ``value`` as JSON values: stand-ins and arrays as text or lists.

    Bytes become ``{"base64": ...}``; complex numbers, non-finite floats and keys become text.

    Args:
        value: What ``read_pickle`` returns.
        tensor: Makes the value of a tensor; without it a tensor is an error.
        nodes_max: Values that it may hold, shared ones counted each time.

    Raises:
        ForeignClassError: It holds a tensor, or is deeper or larger than any small value.
    """
    return _Converter(tensor, nodes_max).convert(value, 0)


class _Converter:
    """Converts with bounds: JSON repeats what a pickle shares."""

    def __init__(self, tensor: Callable[[TensorRef], Any] | None, nodes_max: int) -> None:
        self._tensor = tensor
        self._nodes_left = nodes_max
        self._bytes_left = _TEXT_BYTES_MAX

    def _count(self, num_nodes: int, num_bytes: int = 0) -> None:
        self._nodes_left -= num_nodes
        self._bytes_left -= num_bytes
        if self._nodes_left < 0 or self._bytes_left < 0:
            raise ForeignClassError("a value is too large to be kept as JSON")

    def convert(self, value: Any, depth: int) -> Any:
        self._count(1)
        if depth > _DEPTH_MAX:
            raise ForeignClassError("a value is too deep to be kept as JSON")
        if isinstance(value, str):
            self._count(0, len(value))
            return value
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if abs(value) < float("inf") else repr(value)
        if type(value) is dict:
            return {self._key(k): self.convert(v, depth + 1) for k, v in value.items()}
        if type(value) in {list, tuple}:
            return [self.convert(item, depth + 1) for item in value]
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, bytes):
            from base64 import b64encode

            self._count(0, len(value))
            return {"base64": b64encode(value).decode()}
        if isinstance(value, set | frozenset):
            # The order of a set differs from process to process.
            return sorted((self.convert(item, depth + 1) for item in value), key=repr)
        if isinstance(value, complex):
            return repr(value)
        if type(value) is Global:
            return value.name
        if type(value) is Opaque:
            return self._opaque(value, depth)
        if type(value) is TensorRef and self._tensor is not None:
            self._count(0, value.num_bytes)
            made = self._tensor(value)
            return self.convert(made, depth) if isinstance(made, float) else made
        if type(value) is NumpyArray:
            # Empty lists count too: an array without elements may have many.
            self._count(prod(max(extent, 1) for extent in value.shape))
            return self.convert(value.tolist(), depth + 1)
        raise ForeignClassError(f"a {type(value).__name__} cannot be kept as JSON")

    def _opaque(self, value: Opaque, depth: int) -> Any:
        if not value.args and value.state is None:
            return value.name
        made: dict[str, Any] = {"class": value.name}
        if value.args:
            made["args"] = self.convert(value.args, depth + 1)
        if value.state is not None:
            made["state"] = self.convert(value.state, depth + 1)
        return made

    def _key(self, key: Any) -> str:
        text = _text(key)
        self._count(0, len(text))
        return text


def _text(key: Any) -> str:
    if type(key) is Global:
        return key.name
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return key if isinstance(key, str) else repr(key)
