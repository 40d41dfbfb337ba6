"""What a pickle held, as JSON values: small things that are kept beside the tensors. Pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import ForeignClassError
from ucp_core.torch_files.pickle_arrays import NumpyArray
from ucp_core.torch_files.pickle_classes import Global, Opaque
from ucp_core.torch_files.pickle_tensors import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable


def plain(
    value: Any,
    *,
    tensor: Callable[[TensorRef], Any] | None = None,
    nodes_max: int = 1 << 20,
) -> Any:
    """Return ``value`` as JSON values: stand-ins and arrays as text or lists.

    Bytes become ``{"base64": ...}``, complex numbers and non-finite floats text, keys text.

    Args:
        value: What ``read_pickle`` returns.
        tensor: Makes the value of a tensor; without it a tensor is an error.
        nodes_max: Values that it may hold, shared ones counted each time.

    Raises:
        ForeignClassError: It holds a tensor, or is deeper or larger than any small value.
    """
    return _Plain(tensor, nodes_max).convert(value, 0)


class _Plain:
    """Converts with a bound on nodes and depth: shared parts would be written again and again."""

    def __init__(self, tensor: Callable[[TensorRef], Any] | None, nodes_max: int) -> None:
        self._tensor = tensor
        self._left = nodes_max

    def convert(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > 100:  # noqa: PLR2004
            raise ForeignClassError("a value is too large or too deep to be kept as JSON")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if abs(value) < float("inf") else repr(value)
        if type(value) is dict:
            return {_text(k): self.convert(v, depth + 1) for k, v in value.items()}
        if type(value) in {list, tuple}:
            return [self.convert(item, depth + 1) for item in value]
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, bytes):
            from base64 import b64encode

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
            return self._tensor(value)
        if type(value) is NumpyArray:
            # Lists that are empty are values too: an array without elements may have many.
            self._left -= prod(max(extent, 1) for extent in value.shape)
            return self.convert(value.tolist(), depth + 1) if self._left >= 0 else None
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


def _text(key: Any) -> str:
    if type(key) is Global:
        return key.name
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return key if isinstance(key, str) else repr(key)
