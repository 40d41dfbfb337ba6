"""Events and actions as values that are cheap to make."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a dataclass that is frozen for the type checker only.

    Freezing it at run time makes it four times as slow to create: 5 % of a simulated history.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
