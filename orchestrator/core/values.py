"""Events and actions as values that are cheap to make."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


class Later(Sequence[T]):
    """A sequence that is made, once, when it is first looked at. It equals a tuple of the same.

    A fold of the journal looks at no order, and 80,000 small tuples take longer than the decision.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make, self._made = make, tuple[T, ...]()

    def _all(self) -> tuple[T, ...]:
        self._made = self._made or tuple(self._make())
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Later) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


@dataclass_transform(kw_only_default=True, frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a dataclass that is frozen for the type checker only.

    Freezing it at run time makes it four times as slow to create: 5 % of a simulated history.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


def kinds(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return the classes of a module that are directly derived from ``base``, by name."""
    found = vars(module).items()
    return {name: each for name, each in found if getattr(each, "__bases__", ()) == (base,)}
