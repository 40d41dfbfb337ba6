"""Shows the changes in a script that becomes elastic: ``python -m tests.support.ports.changes
NAME``."""

import difflib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def changes(port: str) -> list[str]:
    """Return the hunks of a diff between the original and what became of it."""
    before, after = (
        (FOLDER / f"{port}_{kind}.py").read_text(encoding="utf-8").splitlines()
        for kind in ("plain", "elastic")
    )
    return list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]


if __name__ == "__main__":
    print("\n".join(changes(sys.argv[1])))
