"""Events and actions as values: nobody changes one, and to make one costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a dataclass of ``cls`` that is frozen to the type checker only.

    One that is frozen at run time sets every field by a call: that is four times the price, and
    was a twentieth of the time of a simulated history.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
