"""Typed values as JSON values and back, by the type hints of their classes.

Every field is carried. A hint without a codec is refused when the codec is made, and what is read
is checked against the hints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from orchestrator.core.state import MutableRunState, RunState, Table, freeze
from ucp_core.layout import ParallelLayout

#: JSON has no numbers for these.
_NOT_FINITE = frozenset({"inf", "-inf", "nan"})


@dataclass(frozen=True, slots=True)
class Codec:
    """How one type is written and read.

    Attributes:
        encode: Value to JSON value; tuples count as arrays.
        decode: The way back. Raises ``TypeError``, ``ValueError``, ``KeyError``,
            ``AttributeError`` or ``AssertionError`` for what is no such value.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def codec(hint: Any) -> Codec:
    """Return the codec of a type, as it is written in an annotation."""
    for applies, make in _MAKERS:
        if applies(hint):
            return make(hint)
    raise AssertionError(f"no codec for {hint}")


def field_codecs(kind: Any) -> dict[str, Codec]:
    """Return the codec of every field of a dataclass or a named tuple, by name."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields
    return {name: codec(hints[name]) for name in names}


def _same(value: Any) -> Any:
    return value


def _plain(kind: Any) -> Codec:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is not {kind.__name__}")
        return value

    return Codec(_same, decode)


def _float(_hint: Any) -> Codec:
    def encode(value: float) -> Any:
        return value if isfinite(value) else str(value)

    def decode(value: Any) -> float:
        # JSON writes 1.0 as 1.0, but other writers may not.
        if type(value) is float or type(value) is int or value in _NOT_FINITE:
            return float(value)
        raise TypeError(f"{value!r} is not float")

    return Codec(encode, decode)


def _enum(hint: Any) -> Codec:
    return Codec(lambda value: value.value, hint)


def _layout(_hint: Any) -> Codec:
    return Codec(ParallelLayout.to_json, ParallelLayout.from_json)


def _optional(hint: Any) -> Codec:
    (inner,) = (codec(arg) for arg in get_args(hint) if arg is not NoneType)
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value: None if value is None else inner.decode(value),
    )


def _tuple(hint: Any) -> Codec:
    args = get_args(hint)
    if args[-1] is Ellipsis:
        return _sequence(codec(args[0]), tuple)
    inners = [codec(arg) for arg in args]

    def encode(value: Any) -> Any:
        return [inner.encode(part) for inner, part in zip(inners, value, strict=True)]

    def decode(value: Any) -> Any:
        return tuple(inner.decode(part) for inner, part in zip(inners, value, strict=True))

    return Codec(_same if _is_same(*inners) else encode, decode)


def _list(hint: Any) -> Codec:
    return _sequence(codec(get_args(hint)[0]), list)


def _sequence(inner: Codec, kind: Callable[[Any], Any]) -> Codec:
    encode, decode = inner.encode, inner.decode
    return Codec(
        _same if _is_same(inner) else lambda value: [encode(part) for part in value],
        lambda value: kind(decode(part) for part in value),
    )


def _dict(hint: Any) -> Codec:
    key, inner = get_args(hint)[0], codec(get_args(hint)[1])
    assert key is str, f"no codec for {hint}: the keys of a JSON object are texts"
    return Codec(
        lambda value: {name: inner.encode(part) for name, part in value.items()},
        lambda value: {name: inner.decode(part) for name, part in value.items()},
    )


def _table(hint: Any) -> Codec:
    # In their order, which the run goes by: a JSON object has none, and no numbers for keys.
    items = codec(list[tuple.__class_getitem__((int, get_args(hint)[0]))])  # type: ignore[misc]
    return Codec(
        lambda value: items.encode(list(value.items())),
        lambda value: Table.of(items.decode(value)),
    )


def _record(hint: Any) -> Codec:
    codecs = field_codecs(hint)

    def encode(value: Any) -> Any:
        return {name: each.encode(getattr(value, name)) for name, each in codecs.items()}

    def decode(value: Any) -> Any:
        if value.keys() != codecs.keys():
            raise KeyError(f"{hint.__name__} has other fields than {sorted(value)}")
        return hint(**{name: each.decode(value[name]) for name, each in codecs.items()})

    return Codec(encode, decode)


def _state(_hint: Any) -> Codec:
    run = codec(MutableRunState)
    return Codec(run.encode, lambda value: freeze(run.decode(value)))


def _is_same(*codecs: Codec) -> bool:
    return all(each.encode is _same for each in codecs)


#: The first that applies makes the codec of a hint.
_MAKERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Codec]], ...] = (
    (lambda hint: hint in (int, str, bool), _plain),
    (lambda hint: hint is float, _float),
    (lambda hint: hint is ParallelLayout, _layout),
    (lambda hint: hint is RunState, _state),
    (lambda hint: get_origin(hint) is tuple, _tuple),
    (lambda hint: get_origin(hint) is list, _list),
    (lambda hint: get_origin(hint) is dict, _dict),
    (lambda hint: get_origin(hint) is Table, _table),
    (
        lambda hint: get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint),
        _optional,
    ),
    (lambda hint: isinstance(hint, type) and issubclass(hint, Enum), _enum),
    (lambda hint: is_dataclass(hint) or hasattr(hint, "_fields"), _record),
)
