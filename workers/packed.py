"""Pickling of values that are sent by the thousand."""

from dataclasses import fields, make_dataclass
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

#: By class: one with the same slots whose values can be set.
_MAKERS: dict[type, type[Any]] = {}


def packed(cls: type[T]) -> type[T]:
    """Pickle a dataclass with slots by the values of its fields.

    As Python does it, a frozen one lists its fields each time: that takes four times as long. It
    also sets each value by a call of its own, which a class that is not frozen need not do.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    values = attrgetter(*names)
    _MAKERS[cls] = make_dataclass(cls.__name__, names, slots=True)
    cls.__reduce__ = lambda self: (_unpacked, (cls, values(self)))  # type: ignore[method-assign]
    return cls


def _unpacked(cls: type[T], values: tuple[Any, ...]) -> T:
    made: Any = _MAKERS[cls](*values)
    made.__class__ = cls
    found: T = made
    return found
