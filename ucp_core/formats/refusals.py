"""The errors about foreign files and folders: each names the place, and what is wrong with it."""

from collections.abc import Iterable
from typing import Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.numerics import shortened


def corrupt(where: str, what: str, **facts: Any) -> CheckpointCorruptError:
    """Return the error for a file or folder that its framework would not have written like this."""
    return CheckpointCorruptError(f"{where}: {what}", path=where, **facts)


def two_saves(where: str, what: str, **facts: Any) -> CheckpointCorruptError:
    """Return the error for a file of another save, as an interrupted save leaves it."""
    return corrupt(where, f"{what}: the folder mixes two saves", **facts)


def missing(directory: str, names: Iterable[str]) -> CheckpointCorruptError:
    """Return the error for a folder without some of its files."""
    lacking = list(names)
    return CheckpointCorruptError(
        f"{directory} lacks {shortened(lacking, 4)}: the checkpoint was not copied or saved "
        "completely; use another one",
        path=directory,
    )
