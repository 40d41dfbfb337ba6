"""Typed values as JSON values and back, by the type hints of their classes.

``encode`` writes every field. A decoder checks what it reads against the type hints. ``decoder``
fails for a type that it does not support.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from orchestrator.core.state import Table

#: Decodes a JSON value. It raises ``TypeError``, ``ValueError``, ``KeyError``, ``AttributeError``
#: or ``AssertionError`` if the value does not fit the type.
Decoder: TypeAlias = Callable[[Any], Any]

#: Floats that JSON cannot express. They are written as text.
_NOT_FINITE = frozenset({"inf", "-inf", "nan"})
_PLAIN = frozenset({int, str, bool, NoneType})


def encode(value: Any) -> Any:
    """Return a value as a JSON value."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if isfinite(value) else str(value)
    if kind is tuple or kind is list:
        # Inlined for speed: a large run starts with a hundred thousand names.
        return [part if type(part) in _PLAIN else encode(part) for part in value]
    if kind is dict:
        return {name: encode(part) for name, part in value.items()}
    if kind is Table:
        # A list of pairs keeps the order, which matters, and the type of keys; a JSON object has
        # neither.
        return [[number, encode(part)] for number, part in value.items()]
    if isinstance(value, Enum):
        return value.value
    return {name: encode(getattr(value, name)) for name in _names(kind)}


@cache
def decoder(hint: Any) -> Decoder:
    """Return the decoder for a type, given as in an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return partial(_exactly, hint)
    if hint is float:
        return _float
    if origin is tuple and args[-1] is not Ellipsis:
        return _pair(*map(decoder, args))
    if origin in (tuple, list):
        if args[0] in _PLAIN:
            # Without a call for each: events of a large run have thousands of names.
            return lambda value: origin(_all_exactly(args[0], value))
        part = decoder(args[0])
        return lambda value: origin(map(part, _exactly(list, value)))
    if origin is dict and args[0] is str:
        part = decoder(args[1])
        return lambda value: {name: part(each) for name, each in value.items()}
    if origin is Table:
        item = _pair(decoder(int), decoder(args[0]))
        return lambda value: Table.of(map(item, value))
    if origin in (Union, UnionType) and NoneType in args:
        (inner,) = (decoder(arg) for arg in args if arg is not NoneType)
        return lambda value: None if value is None else inner(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return _record(hint)


def known_fields(kind: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoded fields that ``document`` has; one of another version may lack some."""
    decoders = _field_decoders(kind)
    return {name: each(document[name]) for name, each in decoders.items() if name in document}


@cache
def _field_decoders(kind: Any) -> dict[str, Decoder]:
    names, hints = _names(kind), get_type_hints(kind)
    return {name: decoder(hints[name]) for name in names}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    assert is_dataclass(kind) or hasattr(kind, "_fields"), f"no codec for {kind}"
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else kind._fields


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


def _all_exactly(kind: type, values: Any) -> Any:
    if not {kind}.issuperset(map(type, _exactly(list, values))):
        raise TypeError(f"not all of {values!r} are {kind.__name__}")
    return values


def _float(value: Any) -> float:
    # Another writer may write 1.0 as 1.
    if type(value) is float or type(value) is int or value in _NOT_FINITE:
        return float(value)
    raise TypeError(f"{value!r} is not float")


def _pair(*inners: Decoder) -> Decoder:
    return lambda value: tuple(
        inner(part) for inner, part in zip(inners, _exactly(list, value), strict=True)
    )


def _record(kind: Any) -> Decoder:
    decoders = _field_decoders(kind)

    def decode(value: Any) -> Any:
        if value.keys() != decoders.keys():
            raise KeyError(f"the fields of {kind.__name__} are not {sorted(value)}")
        return kind(**{name: each(value[name]) for name, each in decoders.items()})

    return decode
