"""Parts of the run state: mutable while one event is folded, frozen afterwards."""

from dataclasses import FrozenInstanceError
from typing import Any, NoReturn


class StatePart:
    """A part that equals another if their fields are equal, whether frozen or not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatePart) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Refuse: a part may hold tables, which are not hashable."""
        raise TypeError("a part of the run state is not hashable")


class Frozen:
    """A part that can no longer be changed."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        """Refuse: a state is a value."""
        raise FrozenInstanceError(f"cannot assign to field {name!r} of a run state")
