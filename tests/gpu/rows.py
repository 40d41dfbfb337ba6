"""One row of the table: what a part has seen, and what it is to be."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Final

#: Before a row in the output of a part's process.
MARK: Final = "ROW "


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    part: str  #: The part that it belongs to.
    what: str  #: The measured quantity.
    seen: str  #: The measured value.
    bar: str = ""  #: The required value; "" without a requirement.
    ok: bool | None = None  #: Whether it is so; None if nothing is asked, or it was skipped.

    def tell(self) -> None:
        """Print the row for the process that collects the table."""
        print(MARK + json.dumps(asdict(self)), flush=True)  # noqa: T201

    @classmethod
    def of(cls, line: str) -> Row | None:
        """Return the row in a line of output; None if there is none."""
        return cls(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def tell(part: str, what: str, seen: object, bar: str = "", *, ok: bool | None = None) -> None:
    """Print a row."""
    shown = f"{seen:.3g}" if isinstance(seen, float) else str(seen)
    Row(part=part, what=what, seen=shown, bar=bar, ok=ok).tell()


def note(text: str) -> None:
    """Show progress apart from the rows."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
