"""Convert the values of a pickle to JSON: the small ones, kept beside tensors. Pure."""

from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from math import prod
from typing import Any

from ucp_core.errors import ForeignClassError
from ucp_core.torch_files.budget import current_budget
from ucp_core.torch_files.pickle_arrays import NumpyArray
from ucp_core.torch_files.pickle_classes import Global, Opaque
from ucp_core.torch_files.pickle_tensors import TensorRef

_DEPTH_MAX = 100
#: Memory of a value beside its text: its place, and the pieces of JSON around it.
_NODE_BYTES = 256
#: Memory of a reader's notes about each value that it keeps: its name and what became of it.
_NOTE_BYTES = 512
#: JSON is a text, the pieces of it, and the bytes of a file, some of them briefly twice.
_TEXT_COPIES = 4
#: The budget has a lock, which is slower than converting a number.
_OWED_MAX = 64 << 10
#: Python neither prints nor reads longer integers.
_INTEGER_BITS_MAX = 14_281


def as_json(
    value: Any,
    *,
    where: str,
    tensor: Callable[[TensorRef], Any] | None = None,
    exact: bool = False,
) -> Any:
    """Return ``value`` as JSON values: stand-ins and arrays as text or lists.

    Bytes become ``{"base64": ...}``; complex numbers, non-finite floats and keys become text,
    tuples become lists.

    Args:
        value: A result of ``read_pickle``.
        where: The file and the key of the value, for messages.
        tensor: Converts a tensor; without it a tensor is an error.
        exact: Mark what JSON lacks, so that it can be converted back: ``{"tuple": [...]}``,
            ``{"float": "inf"}``, and ``{"dict": [[key, value], ...]}`` if a key is a number.
    """
    converter = _Converter(tensor, where, exact=exact)
    made = converter.convert(value, 0)
    converter.pay()
    return made


class _Converter:
    """Pays for every value in advance: JSON repeats what a pickle shares."""

    def __init__(
        self, tensor: Callable[[TensorRef], Any] | None, where: str, *, exact: bool
    ) -> None:
        self._tensor = tensor
        self._exact = exact
        self._where = where
        self._budget = current_budget()
        self._owed = _NOTE_BYTES

    def _count(self, num_nodes: int, num_bytes: int = 0) -> None:
        self._owed += num_nodes * _NODE_BYTES + num_bytes * _TEXT_COPIES
        if self._owed > _OWED_MAX:
            self.pay()

    def pay(self) -> None:
        """Draw the bytes that were counted since the last call from the budget."""
        self._budget.draw(self._owed, self._where)
        self._owed = 0

    def convert(self, value: Any, depth: int) -> Any:
        self._count(1)
        if depth > _DEPTH_MAX:
            raise ForeignClassError("a value is too deep to be kept as JSON")
        if isinstance(value, str):
            self._count(0, len(encode_basestring_ascii(value)))
            return value
        if isinstance(value, int):
            # Three bits are a digit or less. Printing takes time quadratic in the digits.
            self._count(0, value.bit_length() // 3)
            if value.bit_length() > _INTEGER_BITS_MAX:
                raise ForeignClassError(
                    f"an integer of {value.bit_length()} bits is too large to be kept as JSON"
                )
            return value
        if value is None:
            return value
        if isinstance(value, float):
            if abs(value) < float("inf"):
                return value
            return {"float": repr(value)} if self._exact else repr(value)
        if type(value) in {dict, list, tuple}:
            return self._container(value, depth + 1)
        return self._object(value, depth)

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) is not dict:
            items = [self.convert(item, depth) for item in value]
            return {"tuple": items} if self._exact and type(value) is tuple else items
        if self._exact and any(type(key) in {int, float, bool} for key in value):
            return {"dict": self.convert([list(pair) for pair in value.items()], depth)}
        named = {_text(key): item for key, item in value.items()}
        self._count(0, sum(len(encode_basestring_ascii(name)) for name in named))
        return {name: self.convert(item, depth) for name, item in named.items()}

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
            # Empty lists count, too: an array without elements may have many.
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


def _text(key: Any) -> str:
    if type(key) is Global:
        return key.name
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return key if isinstance(key, str) else repr(key)
